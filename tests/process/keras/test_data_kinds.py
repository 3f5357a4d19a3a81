# SPDX-License-Identifier: Apache-2.0
"""Each file of docs/data.md trains as it stands there; classes of Keras and TensorFlow give their records."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf
from PIL import Image

import edl
from edl import config
from edl.config import values
from edl.contract.layout import StepSlice
from edl.data.conversion import convert
from edl.data.same import digest_of_reader
from edl.errors import DataError, ModelError
from edl.trainer.model import user_model
from edl.trainer.records.records import Records

PAGE = Path(__file__).parents[3] / "docs" / "data.md"
EXAMPLES = dict(
    re.findall(r"\n## ([^\n]+)\n(?:(?!\n## ).)*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
)
STREAM = re.findall(r"\n## Streams\n.*?```python.*?```.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the examples read."""
    tmp_path = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"rooms": rng.integers(1, 9, 200), "age": rng.normal(40, 9, 200)})
    frame["city"] = rng.choice(["Oslo", "Bergen"], 200)
    frame["price"] = frame["rooms"] / 2 + (frame["city"] == "Oslo")
    frame.to_csv(tmp_path / "houses.csv", index=False)
    (tmp_path / "houses").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / "records").mkdir()
    for nth in range(2):
        frame[nth * 100 : nth * 100 + 100].to_csv(tmp_path / "houses" / f"{nth}.csv", index=False)
        chunk = b""
        with tf.io.TFRecordWriter(str(tmp_path / "examples" / f"{nth}.tfrecord")) as writer:
            for pixels in rng.normal(size=(100, 16)):
                values = {"pixels": pixels, "age": pixels[:1], "label": pixels[:1] + pixels[1]}
                floats = {
                    name: tf.train.Feature(float_list=tf.train.FloatList(value=value))
                    for name, value in values.items()
                }
                example = tf.train.Example(features=tf.train.Features(feature=floats))
                record = example.SerializeToString()
                writer.write(record)
                chunk += struct.pack("<I", len(record)) + record
        head = struct.pack("<5I", 0x01020304, zlib.crc32(chunk), 0, len(chunk), 100)
        (tmp_path / "records" / f"data-{nth}").write_bytes(head + chunk)
    for name, most in (("cat", 150), ("dog", 256)):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for nth in range(60):
            image = Image.fromarray(rng.integers(0, most, (20, 24, 3), np.uint8))
            image.save(tmp_path / "pets" / name / f"{nth}.png")
    stream: dict[str, Any] = {}
    exec(STREAM, stream)
    convert(stream["data"]("train"), tmp_path / "train.array_record", "stream.py")
    (tmp_path / "records.bin").write_bytes(rng.bytes(8 * 100))
    return tmp_path


def test_the_page_has_a_file_for_each_kind() -> None:
    assert list(EXAMPLES) == [
        "Records that are held out",
        "Without data()",
        "Arrays",
        "Tables",
        "Files",
        "TFRecord",
        "RecordIO",
        "Images",
        "PyDataset",
        "Datasets of records",
        "tf.data",
        "Streams",
        "Augmentation",
        "Your own reader",
    ]


@pytest.mark.parametrize("title", EXAMPLES)
def test_a_file_of_the_page_learns_from_its_records(
    title: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    keras.utils.set_random_seed(0)  # else the seed that an earlier test has left decides
    file = tmp_path / "my_model.py"
    file.write_text(EXAMPLES[title])
    sets = "data.train=houses.csv,data.label=price,data.features={rooms,age}"
    named = config.parse(values.load([], [sets])).data if title == "Without data()" else None
    module = user_model.load(str(file), "", named)
    reader = module.reader("train")
    assert reader is not None
    feed, transform = module.feed_of("train"), module.transform_of("train")
    records = Records(reader, feed, "my_model.py", shuffle=True, transform=transform)
    records.choose_layout(1 << 20, 2)
    model = module.model()
    size = records.layout.records
    losses = []
    for epoch in range(30):
        for start in range(epoch * size, (epoch + 1) * size, 50):
            batch = records.batch(start, min(start + 50, (epoch + 1) * size), StepSlice.even(0, 1))
            assert batch is not None
            losses.append(np.ravel(model.train_on_batch(batch.x, batch.y, batch.weights))[0])
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4]), losses
    if (test := module.reader("validation")) is not None:
        assert 0 < len(test) <= size


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
        (lambda: pipeline(1000).shuffle(1000).batch(500), "batch 0 has other records the second time"),
        (lambda: late(pipeline(8)), "batch 1 has other records the second time"),
        (lambda: pipeline(8).map(flipped).batch(4), r"draws random numbers \(RandomUniform\)"),
        (
            lambda: pipeline(3).interleave(lambda x, y: pipeline(2).map(flipped)).batch(4),
            r"draws random numbers \(RandomUniform\)",
        ),
        (lambda: unordered().batch(4), "the pipeline has deterministic=False"),
        (
            lambda: pipeline(3).flat_map(lambda x, y: unordered()).batch(4),
            "the pipeline has deterministic=False",
        ),
        (lambda: pipeline(8).with_options(any_order()).batch(4), "the pipeline has deterministic=False"),
        (
            lambda: tf.data.Dataset.range(3).map(tf.range).ragged_batch(2),
            "the batch is ragged; make it dense",
        ),
        (lambda: pipeline().batch(4).repeat(), "has no end"),
        (lambda: pipeline(), "batch 0: .*expected an array with an entry for each record"),
        (lambda: pipeline(0).batch(4), "has no records"),
        (lambda: pipeline(200_000).batch(1000), r"take more than 1 MiB of memory \(after 66 batches\)"),
        (lambda: [1, 2], "expected a tf.data.Dataset, not a list"),
    ],
)
@pytest.mark.filterwarnings("ignore:Seed .* from outer graph")  # of a seed that an earlier test has set
def test_a_pipeline_that_workers_could_not_share_is_refused(dataset: Callable[[], Any], why: str) -> None:
    with pytest.raises(DataError, match=f"from_tf: .*{why}"):
        edl.from_tf(dataset(), most_mebibytes=1)


def flipped(x: Any, y: Any) -> Any:
    """Augmentation as in TensorFlow's guides."""
    return x, tf.cond(tf.random.uniform([]) < 0.5, lambda: y, lambda: -y)


def late(dataset: Any) -> Any:
    """A pipeline whose first batch is always the same, and the second is drawn by Python."""

    def drawn(i: Any) -> Any:
        return np.float32(0 if i < 4 else np.random.rand())

    return dataset.map(lambda x, y: tf.numpy_function(drawn, [x["a"]], tf.float32)).batch(4)


def unordered() -> Any:
    return pipeline(8).map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False)


def interleaved() -> Any:
    return pipeline(3).interleave(lambda x, y: pipeline(2), num_parallel_calls=2)


def any_order() -> Any:
    options = tf.data.Options()
    options.deterministic = False
    return options


def test_pipelines_that_are_the_same_each_time_have_the_digest_of_their_records() -> None:
    shuffled = lambda seed: pipeline().shuffle(10, seed=seed, reshuffle_each_iteration=False)  # noqa: E731
    stateless = pipeline().map(lambda x, y: (x, y + tf.random.stateless_uniform([], (1, 2), dtype=y.dtype)))
    found = [
        digest_of_reader(edl.split(edl.from_tf(dataset.batch(4)))["train"])
        for dataset in (
            pipeline(),
            pipeline(),
            interleaved(),
            stateless,
            shuffled(1),
            shuffled(1),
            shuffled(2),
        )
    ]
    assert all(found)
    assert found[0] == found[1]
    assert found[4] == found[5]
    assert len(set(found)) == 5


def test_records_that_differ_when_data_is_called_again_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import edl, random, tensorflow as tf\ndef model(): ...\n"
        "def data(split): return edl.from_tf(tf.data.Dataset.from_tensors([random.random()]))\n"
    )
    module = user_model.load(str(tmp_path / "mine.py"))
    assert module.reader("train") is not None
    with pytest.raises(DataError, match=r"data\('train'\) has other records than when it was called before"):
        module.reader("train")


def test_a_model_that_returns_a_pipeline_is_told_the_way_on(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import tensorflow as tf\ndef model(): ...\ndef data(split): return tf.data.Dataset.range(3)\n"
    )
    with pytest.raises(
        ModelError, match=r"mine.py: data\('train'\) is a tf.data.Dataset, .*edl.from_tf\(dataset\)"
    ):
        user_model.load(str(tmp_path / "mine.py")).reader("train")
