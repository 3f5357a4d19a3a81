"""Files in public formats: Parquet, and Criteo's click logs as text and as Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet as pa_parquet

import edl
from edl.data.lines import EVERY, Lines
from edl.errors import DataError

RECORDS = 3 * EVERY + 17


def logs(records: int = RECORDS) -> dict[str, list[Any]]:
    """Made up; as Criteo has them: some values are missing, and counts can be negative."""
    chance = np.random.default_rng(3)
    columns: dict[str, list[Any]] = {"label": chance.integers(0, 2, records).tolist()}
    for n in range(1, 14):
        numbers = chance.integers(-2, 500, records).tolist()
        columns[f"I{n}"] = [None if chance.random() < 0.2 else number for number in numbers]
    for n in range(1, 27):
        hashes = chance.integers(0, 1 << 32, records).tolist()
        columns[f"C{n}"] = [None if chance.random() < 0.1 else f"{number:08x}" for number in hashes]
    return columns


def as_text(columns: dict[str, list[Any]], path: Path, last: str = "\n") -> Path:
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join("\t".join("" if v is None else str(v) for v in row) for row in rows) + last)
    return path


def check(read: dict[str, np.ndarray], columns: dict[str, list[Any]], start: int, stop: int) -> None:
    """Against the definition, value by value."""
    assert read["clicked"].tolist() == columns["label"][start:stop] and read["clicked"].dtype == np.float32
    assert read["numbers"].shape == (stop - start, 13) and read["numbers"].dtype == np.float32
    assert read["ids"].shape == (stop - start, 26) and read["ids"].dtype == np.int64
    for n in range(13):
        expected = np.log1p(np.array([max(v or 0, 0) for v in columns[f"I{n + 1}"][start:stop]], float))
        assert np.allclose(read["numbers"][:, n], expected)
    for n in range(26):
        texts = columns[f"C{n + 1}"][start:stop]
        assert read["ids"][:, n].tolist() == [-1 if t is None else (n << 32) + int(t, 16) for t in texts]


SPANS = [(0, 5), (EVERY - 1, EVERY + 1), (EVERY, 2 * EVERY), (10, RECORDS), (RECORDS - 1, RECORDS), (7, 7)]


@pytest.mark.parametrize("last", ["\n", ""])
def test_the_text_of_criteo_is_read_from_anywhere(tmp_path: Path, last: str) -> None:
    columns = logs()
    columns["C26"][-1] = "0000002a"  # so that the last line ends with a value
    reader = edl.criteo(as_text(columns, tmp_path / "day_0.txt", last))
    assert len(reader) == RECORDS
    for start, stop in SPANS:
        check(reader.read(start, stop), columns, start, stop)


@pytest.mark.parametrize("names", ["I", "integer_feature_"])
@pytest.mark.parametrize("numbers", [False, True])
def test_the_parquet_of_criteo_says_the_same(tmp_path: Path, names: str, numbers: bool) -> None:
    columns = logs()
    table = {
        name.replace("I", names).replace("C", "C" if names == "I" else "categorical_feature_"): [
            int(v, 16) if numbers and name[0] == "C" and v is not None else v for v in values
        ]
        for name, values in columns.items()
    }
    pa_parquet.write_table(pyarrow.table(table), tmp_path / "logs.parquet", row_group_size=1000)
    reader = edl.criteo(tmp_path / "logs.parquet")
    assert len(reader) == RECORDS
    for start, stop in [*SPANS, (999, 2001)]:
        check(reader.read(start, stop), columns, start, stop)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("label", 2, "record 40: the label must be 0 or 1"),
        ("label", None, "record 40: the label must be 0 or 1"),
        ("C7", "xyz", "record 40: category C7 must be up to eight hexadecimal digits, and is 'xyz'"),
        ("C7", "123456789", "record 40: category C7 must be up to eight hexadecimal digits"),
        ("C7", "-1", "record 40: category C7 must be up to eight hexadecimal digits, and is '-1'"),
        ("C7", "0x1f", "record 40: category C7 must be up to eight hexadecimal digits, and is '0x1f'"),
        ("I3", "many", "line 41, column I3: not a click log of Criteo: .*invalid value 'many'"),
        ("I3", "1\t2", r"line 41: not a click log of Criteo: Expected 40 columns, got 41"),
    ],
)
def test_a_record_that_is_none_is_named(tmp_path: Path, column: str, value: Any, says: str) -> None:
    columns = logs(100)
    columns[column][40] = value
    reader = edl.criteo(as_text(columns, tmp_path / "bad.txt"))
    with pytest.raises(DataError, match=says):
        reader.read(30, 50)
    assert len(reader.read(41, 60)["ids"]) == 19


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("label", ["yes", "no"], "column label holds string; expected numbers"),
        ("I3", ["1", "2"], "column I3 holds string; expected numbers"),
        ("C7", [1.0, None], "column C7 holds double; expected text or whole numbers"),
    ],
)
def test_a_column_of_another_type_is_named(tmp_path: Path, column: str, values: list[Any], says: str) -> None:
    path = tmp_path / "logs.parquet"
    pa_parquet.write_table(pyarrow.table({**logs(2), column: values}), path)
    with pytest.raises(DataError, match=says):
        edl.criteo(path).read(0, 2)


def test_truth_values_are_labels_categories_may_be_numbered_and_what_is_no_number_is_missing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "logs.parquet"
    given = {
        "label": [True, False],
        "I3": [float("nan"), 1.5],
        "C7": pyarrow.array(["ff", None]).dictionary_encode(),
    }
    pa_parquet.write_table(pyarrow.table({**logs(2), **given}), path)
    read = edl.criteo(path).read(0, 2)
    assert read["clicked"].tolist() == [1, 0]
    assert read["numbers"][:, 2] == pytest.approx([0, np.log1p(1.5)])
    assert read["ids"][:, 6].tolist() == [(6 << 32) + 255, -1]


def test_files_that_are_no_logs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"day\.gz: is compressed"):
        edl.criteo(tmp_path / "day.gz")
    with pytest.raises(DataError, match=r"none\.txt: cannot be read: No such file"):
        edl.criteo(tmp_path / "none.txt")
    pa_parquet.write_table(pyarrow.table({"label": [1]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="is not one of Criteo's: column 'I1' is missing"):
        edl.criteo(tmp_path / "other.parquet")
    (tmp_path / "fake.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        edl.criteo(tmp_path / "fake.parquet")


def test_a_file_that_became_shorter_is_not_read_as_if_it_had_not(tmp_path: Path) -> None:
    path = as_text(logs(100), tmp_path / "logs.txt")
    reader = edl.criteo(path)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(DataError, match="is shorter than it was when the job began"):
        reader.read(0, 100)


@pytest.mark.parametrize("count", [0, 1, EVERY - 1, EVERY, EVERY + 1, 5 * EVERY])
def test_lines_are_found_wherever_chunks_end(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edl.data.lines.CHUNK", 1000)
    lines = [b"%d\n" % (n * n) for n in range(count)]
    (tmp_path / "lines").write_bytes(b"".join(lines))
    found = Lines(tmp_path / "lines")
    assert len(found) == count
    chance = np.random.default_rng(count)
    for _ in range(50):
        start, stop = sorted(chance.integers(0, count + 1, 2).tolist())
        assert found.read(start, stop) == b"".join(lines[start:stop])


def test_a_parquet_file_is_a_dict_of_its_columns(tmp_path: Path) -> None:
    table = pyarrow.table({
        "x": np.arange(10, dtype=np.int32), "text": [f"t{n}" for n in range(10)],
        "vector": [[n, n + 0.5] for n in range(10)],
    })  # fmt: skip
    pa_parquet.write_table(table, tmp_path / "t.parquet", row_group_size=4)
    reader = edl.parquet(tmp_path / "t.parquet")
    assert len(reader) == 10
    read = reader.read(3, 9)
    assert read["x"].tolist() == [3, 4, 5, 6, 7, 8] and read["x"].dtype == np.int32
    assert read["text"].tolist() == [f"t{n}" for n in range(3, 9)]
    assert read["vector"].tolist() == [[n, n + 0.5] for n in range(3, 9)]
    assert list(edl.parquet(tmp_path / "t.parquet", ["x"]).read(0, 1)) == ["x"]
    with pytest.raises(DataError, match="column 'y' is missing; there are x, text, vector"):
        edl.parquet(tmp_path / "t.parquet", ["y"])


def test_a_value_that_is_missing_in_a_parquet_file_is_named(tmp_path: Path) -> None:
    table = pyarrow.table({"x": [1, 2, None, 4], "list": [[1], [2], [3], [4, 5]]})
    pa_parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    with pytest.raises(DataError, match="record 2: column 'x' is empty"):
        edl.parquet(tmp_path / "t.parquet", ["x"]).read(1, 4)
    with pytest.raises(DataError, match=r"column 'list' has lists of lengths \[1, 2\]"):
        edl.parquet(tmp_path / "t.parquet", ["list"]).read(1, 4)
