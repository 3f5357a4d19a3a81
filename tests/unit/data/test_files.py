# SPDX-License-Identifier: Apache-2.0
"""Files by address: a path, a list, a glob, a directory or an object store; and files that change."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet as pa_parquet

import edl
from edl.data.files import addresses as data_files
from edl.data.files.index_file import cached
from edl.errors import DataError

COUNTS = (3, 2, 4)


def write_csv(path: Path, x: np.ndarray) -> None:
    path.write_text("x,y\n" + "".join(f"{n},{n / 2}\n" for n in x))


def write_parquet(path: Path, x: np.ndarray) -> None:
    pa_parquet.write_table(pyarrow.table({"x": x, "y": x / 2}), path, row_group_size=2)


WRITERS: dict[str, Callable[[Path, np.ndarray], None]] = {
    "csv": write_csv,
    "parquet": write_parquet,
}


@pytest.fixture(params=WRITERS)
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A format, with three files of it in the current folder: data/0, data/1 and data/sub/2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data" / "sub").mkdir(parents=True)
    name, start = request.param, 0
    for nth, count in enumerate(COUNTS):
        place = tmp_path / "data" / ("sub" if nth == 2 else "") / f"{nth}.{name}"
        WRITERS[name](place, np.arange(start, start + count))
        start += count
    (tmp_path / "data" / "_SUCCESS").touch()
    (tmp_path / "data" / f".hidden.{name}").write_text("no data")
    return str(name)


@pytest.fixture
def memory() -> Iterator[Any]:
    """The object store of fsspec in this process."""
    store = fsspec.filesystem("memory")
    yield store
    store.rm("/", recursive=True)


def test_every_kind_of_address_names_the_same_records(kind: str, memory: Any, tmp_path: Path) -> None:
    memory.put("data", "/bucket/data", recursive=True)
    addresses: list[Any] = [
        "data",
        Path("data"),
        f"data/**/*.{kind}",
        [f"data/{nth}.{kind}" for nth in (0, 1)] + [Path(f"data/sub/2.{kind}")],
        (tmp_path / "data").as_uri(),
        "memory://bucket/data",
        f"memory://bucket/data/**/*.{kind}",
        [f"memory://bucket/data/{nth}.{kind}" for nth in ("0", "1", "sub/2")],
    ]
    read = getattr(edl, kind)
    for address in addresses:
        for reader in (read(address, features="x", label="y"), edl.open_files(address, kind)):
            assert len(reader) == sum(COUNTS), address
            for start, stop in ((0, 9), (2, 6), (4, 5), (9, 9)):
                found = reader.read(start, stop)
                x, y = found.values() if isinstance(found, dict) else found
                assert x.tolist() == list(range(start, stop)), address
                assert y.tolist() == [n / 2 for n in range(start, stop)]


def test_the_format_of_a_directory_is_that_of_its_files(kind: str) -> None:
    (Path("data") / "_SUCCESS").unlink()
    (Path("data") / f".hidden.{kind}").unlink()
    reader = edl.open_files("data", features=["x"], label="y")
    assert reader.read(0, 2)[0].tolist() == [[0], [1]]
    with pytest.raises(DataError, match=f"data: {kind} has no option 'colour'; it has names,"):
        edl.open_files("data", colour=1)
    with pytest.raises(DataError, match=r"data: unknown format 'xls' \(expected csv, "):
        edl.open_files("data", "xls")
    Path("data/notes.md").touch()
    with pytest.raises(DataError, match=r"data: the name of data/notes.md does not say its format; give for"):
        edl.open_files("data")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nowhere.{kind}", "nowhere.{kind}: cannot be read: there is no such file or directory"),
        (["data/0.{kind}", "data/7.{kind}"], "data/7.{kind}: cannot be read: there is no such file"),
        (["data/0.{kind}", "data/*.{kind}"], "edl.{kind}: data/0.{kind} is named twice"),
        ("data/*.none", "data/*.none: no file matches this pattern"),
        ("empty", "empty: the directory has no file whose name ends with .{kind}"),
        ("notes", "it has a.md; a pattern such as notes/* names others"),
        ([], "edl.{kind}: the list of files is empty"),
        ("", "edl.{kind}: the address is empty"),
        ("memory://bucket/none", "memory://bucket/none: cannot be read: there is no such file or directory"),
        ("memory://bucket/*.csv", "memory://bucket/*.csv: no file matches this pattern"),
        ("nostore://bucket/a", "nostore://bucket/a: "),
    ],
)
def test_an_address_without_files_is_named(kind: str, address: Any, why: str) -> None:
    Path("empty").mkdir()
    Path("notes").mkdir()
    Path("notes/a.md").touch()
    of = lambda text: text.replace("{kind}", kind)  # noqa: E731
    with pytest.raises(DataError) as refused:
        getattr(edl, kind)(of(address) if isinstance(address, str) else list(map(of, address)))
    assert of(why) in str(refused.value)


def test_files_with_other_columns_are_named(kind: str, tmp_path: Path) -> None:
    name = f"data/sub/2.{kind}"
    x = np.arange(4)
    if kind == "csv":
        Path(name).write_text("x,z\n1,2\n")
    elif kind == "parquet":
        pa_parquet.write_table(pyarrow.table({"x": x, "z": x}), name)
    else:
        np.savez(name, x=x, z=x)
    with pytest.raises(DataError, match=f"{name}: column 'y' is missing, which data/0.{kind} has"):
        getattr(edl, kind)("data")
    if kind != "csv":  # a CSV file has no types
        WRITERS[kind](Path(name), np.arange(4, dtype=np.int16))
        with pytest.raises(DataError, match=f"{name}: column 'x' is int16.*, and int64.* in data/0.{kind}"):
            getattr(edl, kind)("data")


@pytest.mark.parametrize("fault", ["replaced", "truncated", "grown", "removed"])
def test_a_file_that_changes_is_told_with_the_records(tmp_path: Path, fault: str) -> None:
    for nth in range(3):
        write_parquet(tmp_path / f"{nth}.parquet", np.arange(4))
    reader = edl.parquet(tmp_path)
    assert reader.read(4, 6)["x"].tolist() == [0, 1]
    path = tmp_path / "1.parquet"
    if fault == "replaced":
        write_parquet(tmp_path / "new", np.arange(4, 8))
        (tmp_path / "new").rename(path)
    elif fault == "truncated":
        os.truncate(path, 100)
    elif fault == "grown":
        with open(path, "ab") as file:
            file.write(b"more")
    else:
        path.unlink()
    words = "removed since the job began" if fault == "removed" else "changed or replaced since the job began"
    with pytest.raises(DataError, match=rf"1\.parquet: records 2 to 3 \(row group 1\): the file .*{words}"):
        reader.read(6, 8)
    assert reader.read(8, 12)["x"].tolist() == [0, 1, 2, 3]


def test_an_object_that_changes_is_told(memory: Any) -> None:
    memory.pipe("/bucket/t.csv", b"x\n" + b"1\n" * 50)
    file = data_files.find("memory://bucket/t.csv")[0]
    assert file.read(0, 4) == b"x\n1\n"
    memory.pipe("/bucket/t.csv", b"x\n" + b"2\n" * 50)
    with pytest.raises(DataError, match=r"memory://bucket/t.csv: record 3: the file was changed or replaced"):
        file.read(0, 4, "record 3")


def test_a_store_that_is_away_is_asked_again(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/bucket/t.bin", bytes(range(100)))
    file = data_files.find("memory://bucket/t.bin")[0]
    answers: list[Any] = [RuntimeError("503 Slow Down"), b"short", bytes(range(10, 20))]
    pauses: list[float] = []

    def cat_file(path: str, start: int, end: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    monkeypatch.setattr(memory, "cat_file", cat_file)
    monkeypatch.setattr("edl.data.files.addresses.client", lambda url: (memory, "/bucket/t.bin"))
    monkeypatch.setattr("edl.data.files.addresses.time.sleep", pauses.append)
    assert file.read(10, 20) == bytes(range(10, 20))
    assert pauses == [0.5, 1.0]
    monkeypatch.setattr(data_files, "PATIENCE", 0.1)
    answers[:] = [RuntimeError("503 Slow Down")]
    with pytest.raises(DataError, match=r"t.bin: cannot be read: RuntimeError: 503 Slow Down"):
        file.read(10, 20)


def test_many_files_need_few_handles(tmp_path: Path) -> None:
    for nth in range(300):
        write_parquet(tmp_path / f"{nth:03}.parquet", np.array([nth]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        reader = edl.parquet(tmp_path, features="x")
        assert reader.read(0, 300)[0].tolist() == list(range(300))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("fault", ["none", "damaged", "truncated", "of an older file", "not writable"])
def test_an_index_is_built_once(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("edl.data.files.index_file.BESIDE", 0)
    path = tmp_path / "data" / "f"
    path.parent.mkdir()
    path.write_bytes(b"12345")
    built: list[int] = []

    def build() -> bytes:
        built.append(1)
        return b"index"

    def index() -> bytes:
        return bytes(cached(data_files.find(path)[0], "kind", build))

    if fault == "not writable":
        monkeypatch.setattr("edl.data.files.index_file._beside", lambda file, kind: None)
    assert index() == index() == b"index"
    assert len(built) == 1
    stored = list(tmp_path.rglob("*.edl-index"))
    assert [p.parent.name for p in stored] == ["indexes" if fault == "not writable" else "data"]
    if fault == "damaged":
        stored[0].write_bytes(stored[0].read_bytes()[:-1] + b"?")
    elif fault == "truncated":
        os.truncate(stored[0], 4098)
    elif fault == "of an older file":
        path.write_bytes(b"123456")
    assert index() == index() == b"index"
    assert len(built) == (1 if fault in ("none", "not writable") else 2)
