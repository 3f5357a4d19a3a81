# SPDX-License-Identifier: Apache-2.0
"""Input: edl's reader processes and a tf.data pipeline on the same files, in turn.

    scripts/bench input

Images are decoded from files; rows come from a Parquet file, shuffled. `seconds` is the time for all records
with nothing to train; `waiting` is the share of a step that waits for its batch while a step takes 20 ms (a
sleep, as on a device). Both sides make the same arrays in batches of the same size, and may use all cores of
the machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import pyarrow
import tensorflow as tf
from pyarrow import parquet

from benchmarks.report import Row, main, say
from edl import config
from edl.config import values
from edl.contract.layout import Part
from edl.data import RandomAccess
from edl.trainer.build_data import RECORDS_SERVICE
from edl.trainer.input.parallel_records import ParallelRecords
from edl.trainer.input.processes import ForkServer
from edl.trainer.model import user_model
from edl.trainer.model.data import Batches
from edl.trainer.model.records import Records

IMAGES, PIXELS, IMAGE_BATCH = 1024, 160, 32
ROWS, COLUMNS, GROUP, ROW_BATCH = 200_000, 20, 5_000, 1024
STEP_SECONDS, STEPS = 0.02, 50
READERS = max((os.cpu_count() or 1) - 1, 1)
BUFFER = 128 << 20

IMAGES_MODEL = """
import edl

def model():
    return None

def data(split):
    return edl.images(FOLDER)
"""
ROWS_MODEL = """
import edl

def model():
    return None

def data(split):
    return edl.parquet(FOLDER + "/rows.parquet", label="c0")
"""


class Ours:
    """Batches of reader processes."""

    def __init__(self, module: Path, batch: int):
        loaded = user_model.load(str(module))
        reader = loaded.reader("train")
        assert reader is not None
        layout = Records(reader, loaded.feed_of("train"), "mine", seed=0, shuffle=True)
        layout.fit(BUFFER * 0.75, 1)
        spec = {
            "module": str(module),
            "source": "",
            "data": config.parse(values.defaults()).data.model_dump(by_alias=True),
            "split": "train",
            "seed": 0,
            "shuffle": True,
            "lenient": False,
            "count": len(reader),
        }
        self.records = ParallelRecords(
            ForkServer(RECORDS_SERVICE, spec, 180.0, "the limit"),
            READERS,
            layout.layout,
            0,
            True,
            random_access=isinstance(reader, RandomAccess),
            lenient=False,
            name="mine",
            seconds=600.0,
            warn=say,
        )
        self._batches = Batches(self.records, batch, BUFFER * 0.25)
        self._batches.take(layout.layout, Part.even(0, 1))
        self._step = 0

    def __call__(self, steps: int) -> Iterator[Any]:
        """The next batches."""
        first, self._step = self._step, self._step + steps
        for step in range(first, first + steps):
            batch = self._batches.of(step, first + steps)
            assert batch is not None
            yield batch.x, batch.y


class Peer:
    """Batches of a tf.data pipeline."""

    def __init__(self, pipeline: tf.data.Dataset):
        self._pipeline = pipeline

    def __call__(self, steps: int) -> Iterator[Any]:
        """The first batches of a new epoch."""
        return iter(self._pipeline.take(steps).as_numpy_iterator())


def images(folder: Path) -> tuple[Ours, Peer, int]:
    """Both sides of decoding images, and the number of steps in an epoch."""
    noise = np.random.default_rng(0)
    for n in range(IMAGES):
        small = noise.integers(0, 255, (20, 20, 3), np.uint8)
        pixels = tf.cast(tf.image.resize(small, (PIXELS, PIXELS)), tf.uint8)
        tf.io.write_file(str(folder / f"{n:05}.jpg"), tf.io.encode_jpeg(pixels))
    module = folder / "images_model.py"
    module.write_text(IMAGES_MODEL.replace("FOLDER", repr(str(folder))), encoding="utf-8")

    def decoded(path: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(path))
        image.set_shape((PIXELS, PIXELS, 3))
        return image

    paths = tf.constant(sorted(map(str, folder.glob("*.jpg"))))
    pipeline = tf.data.Dataset.from_tensor_slices(paths).shuffle(IMAGES)
    pipeline = pipeline.map(decoded, tf.data.AUTOTUNE).batch(IMAGE_BATCH).prefetch(tf.data.AUTOTUNE)
    return Ours(module, IMAGE_BATCH), Peer(pipeline), IMAGES // IMAGE_BATCH


def rows(folder: Path) -> tuple[Ours, Peer, int]:
    """Both sides of rows of a Parquet file, and the number of steps in an epoch."""
    numbers = np.random.default_rng(0).random((ROWS, COLUMNS), np.float32)
    file = folder / "rows.parquet"
    table = pyarrow.table({f"c{n}": numbers[:, n] for n in range(COLUMNS)})
    parquet.write_table(table, file, row_group_size=GROUP)
    module = folder / "rows_model.py"
    module.write_text(ROWS_MODEL.replace("FOLDER", repr(str(folder))), encoding="utf-8")

    def groups() -> Iterator[np.ndarray]:
        opened = parquet.ParquetFile(file)
        for group in np.random.permutation(opened.num_row_groups):
            columns = opened.read_row_group(int(group))
            yield np.stack([column.to_numpy() for column in columns.columns], axis=1)

    signature = tf.TensorSpec((None, COLUMNS), tf.float32)
    pipeline = tf.data.Dataset.from_generator(groups, output_signature=signature).unbatch()
    pipeline = pipeline.shuffle(8 * GROUP).batch(ROW_BATCH, num_parallel_calls=tf.data.AUTOTUNE)
    pipeline = pipeline.map(lambda row: (row[:, 1:], row[:, 0])).prefetch(tf.data.AUTOTUNE)
    return Ours(module, ROW_BATCH), Peer(pipeline), ROWS // ROW_BATCH


def seconds(batches: Callable[[int], Iterator[Any]], steps: int) -> float:
    """The time to read so many batches."""
    began = time.perf_counter()
    for _ in batches(steps):
        pass
    return time.perf_counter() - began


def waiting(batches: Callable[[int], Iterator[Any]], steps: int) -> float:
    """The share of the time, in %, that steps of 20 ms wait for their batch; without the first step."""
    taken = batches(steps)
    next(taken)
    waited, began = 0.0, time.perf_counter()
    for _ in range(steps - 1):
        time.sleep(STEP_SECONDS)
        asked = time.perf_counter()
        next(taken)
        waited += time.perf_counter() - asked
    return 100 * waited / (time.perf_counter() - began)


PARTS = {"images": images, "rows": rows}


def measure(parts: list[str], rounds: int) -> Iterable[list[Row]]:
    """Measure each part, both sides in turn."""
    for part in parts:
        with tempfile.TemporaryDirectory() as folder:
            ours, peer, steps = PARTS[part](Path(folder))
            try:
                for side in (ours, peer):
                    seconds(side, steps)  # opens the files
                found: dict[str, tuple[list[float], list[float]]] = {"seconds": ([], []), "waiting": ([], [])}
                for n in range(rounds):
                    say(f"{part}: round {n + 1} of {rounds}")
                    sides: tuple[Ours | Peer, ...] = (ours, peer)
                    for which, side in enumerate(sides):
                        found["seconds"][which].append(seconds(side, steps))
                        found["waiting"][which].append(waiting(side, min(steps, STEPS)))
            finally:
                ours.records.close()
        time_row = Row(f"{part}: an epoch, {READERS} readers", *found["seconds"], "s", "ratio at most 1.05")
        time_row.met = (time_row.ratio or 0) <= 1.05
        waits = Row(f"{part}: waiting in steps of 20 ms", *found["waiting"], "%", "at most 2 %")
        waits.met = sorted(waits.ours)[len(waits.ours) // 2] <= 2
        yield [time_row, waits]


if __name__ == "__main__":
    sys.exit(main("scripts/bench input", __doc__, list(PARTS), measure))
