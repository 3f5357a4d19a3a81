"""Each file of docs/data.md trains as it stands there; classes of Keras and TensorFlow give their records."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf

import edl
from edl.contract import artifacts
from edl.contract.layout import Part
from edl.errors import DataError, ModelError
from edl.trainer.model import user_model
from edl.trainer.model.records import Records

PAGE = Path(__file__).parents[3] / "docs" / "data.md"
EXAMPLES = dict(
    re.findall(r"\n## ([^\n]+)\n(?:(?!\n## ).)*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
)
EDL = str(Path(sys.executable).with_name("edl"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the files that the examples read."""
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"rooms": rng.integers(1, 9, 200), "age": rng.normal(40, 9, 200)})
    frame["city"] = rng.choice(["Oslo", "Bergen"], 200)
    frame["price"] = frame["rooms"] / 2 + (frame["city"] == "Oslo")
    frame.to_csv(tmp_path / "houses.csv", index=False)
    (tmp_path / "records.bin").write_bytes(rng.bytes(8 * 100))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_has_a_file_for_each_kind() -> None:
    assert list(EXAMPLES) == [
        "Arrays", "Tables", "Files", "PyDataset", "Datasets of records", "tf.data", "Your own reader",
    ]  # fmt: skip


@pytest.mark.parametrize("title", EXAMPLES)
def test_a_file_of_the_page_learns_from_its_records(title: str, folder: Path) -> None:
    (folder / "my_model.py").write_text(EXAMPLES[title])
    module = user_model.load("my_model.py")
    reader = module.reader("train")
    assert reader is not None
    records = Records(reader, module.feed_of("train"), "my_model.py", shuffle=True)
    records.fit(1 << 20, 2)
    model = module.model()
    size = records.layout.records
    losses = []
    for epoch in range(30):
        for start in range(epoch * size, (epoch + 1) * size, 50):
            batch = records.batch(start, min(start + 50, (epoch + 1) * size), Part.even(0, 1))
            assert batch is not None
            losses.append(np.ravel(model.train_on_batch(batch.x, batch.y, batch.weights))[0])
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4]), losses
    if (test := module.reader("test")) is not None:
        assert 0 < len(test) <= size


def test_a_table_trains_by_the_command(folder: Path) -> None:
    (folder / "my_model.py").write_text(EXAMPLES["Tables"])
    sets = "workers=2,minWorkers=2,training.epochs=3,training.batchSize=32,local.threads=1"
    command = [EDL, "run", "./my_model.py", "--set", sets, "--output", "job"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((folder / "job" / artifacts.SUMMARY).read_text())
    assert summary["records"]["applied"] == 3 * 160
    assert "held out" in ended.stdout


class Pairs(keras.utils.PyDataset):
    def __init__(self, *sizes: int, weights: bool = False):
        super().__init__()
        self.sizes, self.weights = sizes, weights

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        start = sum(self.sizes[:index])
        x = np.arange(start, start + self.sizes[index])
        return ({"a": x}, -x, x / 2) if self.weights else ({"a": x}, -x)


@pytest.mark.parametrize("weights", [False, True])
def test_a_pydataset_is_cut_into_its_records(weights: bool) -> None:
    reader = edl.dataset(Pairs(4, 4, 3, weights=weights))
    assert len(reader) == 11
    x, *rest = reader.read(3, 10)
    assert x["a"].tolist() == list(range(3, 10))
    assert rest[0].tolist() == list(range(-3, -10, -1))
    assert len(rest) == 1 + weights


def test_a_pydataset_without_an_end_is_refused() -> None:
    class Endless(Pairs):
        @property
        def num_batches(self) -> None:
            return None

        def __len__(self) -> int:
            raise NotImplementedError("it has no end")

    with pytest.raises(
        DataError, match="mine: the PyDataset does not know its number of batches: it has no end"
    ):
        edl.dataset(Endless(4), source="mine")


def pipeline(count: int = 10) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(({"a": np.arange(count)}, np.arange(count) / 2))


def test_the_records_of_a_pipeline_are_read_into_memory() -> None:
    reader = edl.from_tf(pipeline().batch(4))
    x, y = reader.take(np.array([9, 0]))
    assert (len(reader), x["a"].tolist(), y.tolist()) == (10, [9, 0], [4.5, 0.0])


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (lambda: pipeline(1000).shuffle(1000).batch(500), "gives other records the second time it is read"),
        (lambda: pipeline().batch(4).repeat(), "has no end"),
        (lambda: pipeline(), "batch 0: .*expected an array with an entry for each record"),
        (lambda: pipeline(0).batch(4), "has no records"),
        (lambda: pipeline(200_000).batch(1000), r"take more than 1 MiB of memory \(after 66 batches\)"),
        (lambda: [1, 2], "expected a tf.data.Dataset, not a list"),
    ],
)
def test_a_pipeline_that_workers_could_not_share_is_refused(dataset: Callable[[], Any], why: str) -> None:
    with pytest.raises(DataError, match=f"from_tf: .*{why}"):
        edl.from_tf(dataset(), most_mebibytes=1)


def test_a_model_that_returns_a_pipeline_is_told_the_way_on(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import tensorflow as tf\ndef model(): ...\ndef data(split): return tf.data.Dataset.range(3)\n"
    )
    with pytest.raises(
        ModelError, match=r"mine.py: data\('train'\) is a tf.data.Dataset, .*edl.from_tf\(dataset\)"
    ):
        user_model.load(str(tmp_path / "mine.py")).reader("train")
