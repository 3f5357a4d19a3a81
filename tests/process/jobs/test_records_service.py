# SPDX-License-Identifier: Apache-2.0
"""The batches of a reader process: those of a worker, after a way through shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.config import values
from edl.contract.layout import Layout, StepSlice
from edl.contract.order import Order
from edl.errors import DataError, EdlError
from edl.trainer.model import user_model
from edl.trainer.model.records_service import RecordsService
from edl.trainer.records import wire
from edl.trainer.records.batches import Batch
from edl.trainer.records.records import Records
from edl.trainer.records.step_part import StepPart

MODEL = """
import numpy as np
import tensorflow as tf

class Blocks:
    def __len__(self):
        return 100

    def read(self, start, stop):
        numbers = np.arange(start, stop)
        return {"number": numbers, "text": np.array([f"record {n}" for n in numbers])}

def model():
    raise NotImplementedError

def data(split):
    return Blocks()

def feed(records):
    numbers = records["number"]
    if 13 in numbers:
        raise KeyError("label")
    x = {
        "text": records["text"],
        "ragged": tf.RaggedTensor.from_row_lengths(np.repeat(numbers, numbers % 3), numbers % 3),
        "sparse": tf.sparse.from_dense(np.eye(4)[numbers % 4]),
        "half": tf.constant(numbers, tf.bfloat16),
        "noise": np.random.normal(size=len(numbers)),
    }
    return x, numbers * 2.0
"""
TRANSFORMED = """
import numpy as np
import tensorflow as tf

def model():
    raise NotImplementedError

def data(split):
    images = np.arange(30 * 12).reshape(30, 4, 3)
    return {"image": images, "name": np.array([f"record {n}" for n in range(30)])}, np.arange(30)

def transform(features, label, seed):
    tf.debugging.assert_none_equal(label, tf.constant(13, tf.int64), message="an unlucky number")
    cut = tf.image.stateless_random_crop(features["image"], (2, 3), seed)
    if label % 2 == 0:
        cut = -cut
    return {"cut": cut, "name": tf.strings.upper(features["name"])}, [label, 2 * label]
"""
LAYOUT, MINE, OWNERS = Layout(100, 5, 8), StepSlice(1, (1, 1)), 3


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "fed.py"
    file.write_text(MODEL)
    return str(file)


def service(path: str, **given: Any) -> RecordsService:
    settings: dict[str, Any] = {
        "data": values.defaults()["data"],
        "split": "train",
        "seed": 3,
        "shuffle": True,
        "lenient": True,
        "count": 100,
    }
    return RecordsService(path, "", **(settings | given))


def through(value: Any) -> Any:
    return wire.pack(value).unpack()


def shown(batch: Batch | None) -> list[Any]:
    """All values of a batch, as lists."""
    assert batch is not None
    x = batch.x
    dense = [x["text"].numpy(), x["half"].numpy().astype(float), x["noise"], batch.y]
    lists = [np.asarray(array).tolist() for array in dense]
    sparse = [x["sparse"].indices.numpy().tolist(), x["sparse"].values.numpy().tolist()]
    return [batch.indices.tolist(), batch.bad, *lists, x["ragged"].to_list(), *sparse]


def test_pieces_of_several_processes_make_the_batch_that_one_process_reads(path: str) -> None:
    one, several, at_home = service(path), [service(path) for _ in range(OWNERS)], user_model.load(path)
    reader = at_home.reader("train")
    assert reader is not None
    plain = Records(reader, at_home.feed_of("train"), "fed", seed=3, shuffle=True, lenient=True)
    plain.lay_out(LAYOUT)
    order = Order(LAYOUT, 3)
    draws = []
    for start in (0, 20, 80, 100):
        step = StepPart(LAYOUT, start, MINE)
        indices, shards = order.part(start, start + 20, MINE)
        whole = shown(through(one.batch(step, indices, shards)))
        picked = {i: np.flatnonzero(shards % OWNERS == i) for i in np.unique(shards % OWNERS).tolist()}
        pieces = [through(several[i].pick(step, indices[at], shards[at])) for i, at in picked.items()]
        back = np.argsort(np.concatenate(list(picked.values())))
        assert shown(through(several[0].feed(step, indices, back, *pieces))) == whole
        draws.append(whole.pop(4))
        expected = shown(plain.batch(start, start + 20, MINE))
        assert [*expected[:4], *expected[5:]] == whole, "without reader processes"
    assert len({tuple(draw) for draw in draws}) == 4, "each batch draws other random numbers"


def test_a_bad_record_is_found_in_any_way_of_reading(path: str) -> None:
    reads = service(path)
    batch = through(reads.good(np.array([12, 13, 14]), 0))
    assert (batch.indices.tolist(), [b.index for b in batch.bad]) == ([12, 14], [13])
    reads.alone(13, 14)  # it does not kill this process
    with pytest.raises(KeyError, match="label"):
        service(path, lenient=False).good(np.array([12, 13]), 0)


def test_data_of_another_length_or_with_other_records_than_in_the_worker_are_refused(path: str) -> None:
    with pytest.raises(
        DataError, match=r"data\('train'\) has 100 records in a reader process, and had 99 in"
    ):
        service(path, count=99)
    with pytest.raises(DataError, match=r"data\('train'\) has other records in a reader process"):
        service(path, digest="of a pipeline in the worker")


def cuts(batch: Batch | None) -> dict[int, Any]:
    assert batch is not None
    assert [name.decode() for name in batch.x["name"].numpy()] == [f"RECORD {n}" for n in batch.indices]
    assert np.array_equal(batch.y[0], batch.indices)
    assert np.array_equal(batch.y[1], 2 * batch.indices)
    return dict(zip(batch.indices.tolist(), batch.x["cut"].tolist(), strict=True))


def test_a_record_is_transformed_alike_by_any_number_of_workers_and_again(tmp_path: Path) -> None:
    (tmp_path / "fed.py").write_text(TRANSFORMED)
    path = str(tmp_path / "fed.py")
    reads, loaded = service(path, count=30), user_model.load(path)
    layout = Layout(30)
    order = Order(layout, 3)
    epochs = []
    for epoch in range(2):
        start = 30 * epoch
        indices, shards = order.part(start, start + 30, StepSlice.even(0, 1))
        whole = through(reads.batch(StepPart(layout, start, StepSlice.even(0, 1)), indices, shards))
        assert [record.index for record in whole.bad] == [13]
        assert "transform() of the records 13: assertion failed: [an unlucky number]" in whole.bad[0].why
        epochs.append(cuts(whole))
        assert len(epochs[-1]) == 29
        for rank in range(3):  # in the worker, without reader processes
            reader, transform = loaded.reader("train"), loaded.transform_of("train")
            assert reader is not None
            mine = Records(reader, None, "fed", seed=3, shuffle=True, lenient=True, transform=transform)
            for _ in range(2):  # as a step that has failed
                part = cuts(mine.batch(start + 12, start + 24, StepSlice.even(rank, 3)))
                assert part == {index: epochs[-1][index] for index in part}
        assert cuts(through(reads.good(np.arange(12, 15), epoch))) == {n: epochs[-1][n] for n in (12, 14)}
    assert epochs[0] != epochs[1], "each epoch draws other numbers"
    assert loaded.transform_of("test") is None, "it does not take a split"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x, y): return x + tf.random.uniform(()), y", "uses RandomUniform, .*take a parameter named seed"),
        ("x, y): return x", r"transform\(\) must return features, label"),
        ("x, y): return tf.range(y), y", "must return one shape for all records"),
        ("x, y, weight): return x, y, weight", "takes a weight, and the records have none"),
        ("x, y, *, mode): return x, y", r"transform\(\) is called as transform\(features, label\)"),
    ],
)
def test_a_transform_that_workers_could_not_share_is_refused(tmp_path: Path, body: str, words: str) -> None:
    file = tmp_path / "fed.py"
    file.write_text(
        "import numpy as np\nimport tensorflow as tf\ndef model(): ...\n"
        "def data(split): return np.zeros(9), np.arange(9)\n"
        f"def transform({body}\n"
    )
    step, indices = StepPart(Layout(9), 0, StepSlice.even(0, 1)), np.arange(9)
    with pytest.raises(EdlError, match=f"fed.py: .*{words}"):
        service(str(file), count=9, lenient=False).batch(step, indices, np.zeros_like(indices))
