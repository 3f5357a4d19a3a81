# SPDX-License-Identifier: Apache-2.0
"""Input: edl's reader processes, a tf.data pipeline and Grain on the same files, in turn.

    scripts/bench input

Images are decoded from files; rows come from a Parquet file, shuffled. All sides make the same arrays in
batches of the same size, and may use all cores of the machine. The goal is that of the better peer.

- `an epoch`: the time for all records with nothing to train.
- `CPU time`: what an epoch takes on all cores, with reader processes. On a machine that does other work, too,
  it differs less from run to run than the time.
- `waiting`: the share of a step that waits for its batch while a step takes 20 ms (a sleep, as on a device).
- `bytes`: what all workers together read of a Parquet file in an epoch, divided by its size.
- `first`: the time from the call of `data()` to the first batch of 10,000 image files, in one process that
  has imported its libraries.
- `memory`: the largest resident memory of a process that reads an epoch of TFRecord files, at 10 times the
  data.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import grain
import numpy as np
import psutil
import pyarrow
import tensorflow as tf
from PIL import Image
from pyarrow import parquet

from benchmarks.report import Row, main, say
from edl import config
from edl.config import values
from edl.contract.layout import StepSlice
from edl.data import RandomAccess
from edl.trainer.model import user_model
from edl.trainer.records.batches import Batches
from edl.trainer.records.parallel_records import ParallelRecords
from edl.trainer.records.processes import ForkServer
from edl.trainer.records.records import Records
from edl.trainer.start.build_data import RECORDS_SERVICE

IMAGES, PIXELS, IMAGE_BATCH = 1024, 160, 32
ROWS, COLUMNS, GROUP, ROW_BATCH = 200_000, 20, 5_000, 1024
STEP_SECONDS, STEPS = 0.02, 50
CORES = len(os.sched_getaffinity(0))
BUFFER = 128 << 20
RINGS, RING_GROUPS = (1, 3, 6), 200  # workers; row groups of the file that they read
FILES = 10_000
RECORD_BYTES, FEW_RECORDS, TIMES = 10_000, 5_000, 10

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
RECORDS_MODEL = """
import edl

def model():
    return None

def data(split):
    return edl.tfrecord(FOLDER, raw=True)

def feed(records):
    import numpy as np
    return np.array([len(record) for record in records], np.float32), None
"""


class Ours:
    """Batches of reader processes."""

    def __init__(self, module: Path, batch: int):
        reader, records = opened(module)
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
        self._server = ForkServer(RECORDS_SERVICE, spec, 180.0, "the limit")
        self.records = ParallelRecords(
            self._server,
            CORES,
            records.layout,
            0,
            True,
            random_access=isinstance(reader, RandomAccess),
            lenient=False,
            name="mine",
            seconds=600.0,
            warn=say,
        )
        self._batches = Batches(self.records, batch, BUFFER * 0.25)
        self._batches.take(records.layout, StepSlice.even(0, 1))
        self._step = 0

    def __call__(self, steps: int) -> Iterator[Any]:
        """The next batches."""
        first, self._step = self._step, self._step + steps
        for step in range(first, first + steps):
            batch = self._batches.of(step, first + steps)
            assert batch is not None
            yield batch.x, batch.y


def opened(module: Path) -> tuple[Any, Records]:
    """The reader of a model file, and its records in a layout that fits them."""
    loaded = user_model.load(str(module))
    reader = loaded.reader("train")
    assert reader is not None
    records = Records(reader, loaded.feed_of("train"), "mine", seed=0, shuffle=True)
    records.choose_layout(BUFFER * 0.75, 1)
    return reader, records


class Peer:
    """Batches of a tf.data or Grain pipeline; each call begins an epoch."""

    def __init__(self, begin: Callable[[], Iterator[Any]]):
        self._begin = begin

    def __call__(self, steps: int) -> Iterator[Any]:
        batches = self._begin()
        for _ in range(steps):
            yield next(batches)


Sides = tuple[Ours, dict[str, Peer], int]


def images(folder: Path) -> Sides:
    """All sides of decoding images, and the number of steps in an epoch."""
    module = image_files(folder, IMAGES)
    names = sorted(map(str, folder.glob("*.jpg")))

    def decoded(path: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(path))
        image.set_shape((PIXELS, PIXELS, 3))
        return image

    pipeline = tf.data.Dataset.from_tensor_slices(tf.constant(names)).shuffle(IMAGES)
    pipeline = pipeline.map(decoded, tf.data.AUTOTUNE).batch(IMAGE_BATCH).prefetch(tf.data.AUTOTUNE)

    def by_grain() -> Iterator[Any]:
        records = grain.MapDataset.source(names).shuffle(0).map(lambda name: np.asarray(Image.open(name)))
        return iter(records.to_iter_dataset(grain.ReadOptions(num_threads=CORES)).batch(IMAGE_BATCH))

    peers = {"tf.data": Peer(lambda: iter(pipeline.as_numpy_iterator())), "Grain": Peer(by_grain)}
    return Ours(module, IMAGE_BATCH), peers, IMAGES // IMAGE_BATCH


def image_files(folder: Path, count: int) -> Path:
    """Write images, at most 1024 different ones, and a model file that reads them."""
    noise = np.random.default_rng(0)
    different = []
    for _ in range(min(count, IMAGES)):
        small = noise.integers(0, 255, (20, 20, 3), np.uint8)
        pixels = tf.cast(tf.image.resize(small, (PIXELS, PIXELS)), tf.uint8)
        different.append(tf.io.encode_jpeg(pixels).numpy())
    for n in range(count):
        (folder / f"{n:05}.jpg").write_bytes(different[n % len(different)])
    return written(folder / "images_model.py", IMAGES_MODEL, folder)


def written(module: Path, source: str, folder: Path) -> Path:
    module.write_text(source.replace("FOLDER", repr(str(folder))), encoding="utf-8")
    return module


def row_file(folder: Path, count: int, group: int) -> Path:
    """Write a Parquet file, and a model file that reads it."""
    numbers = np.random.default_rng(0).random((count, COLUMNS), np.float32)
    table = pyarrow.table({f"c{n}": numbers[:, n] for n in range(COLUMNS)})
    parquet.write_table(table, folder / "rows.parquet", row_group_size=group)
    return written(folder / "rows_model.py", ROWS_MODEL, folder)


def rows(folder: Path) -> Sides:
    """All sides of rows of a Parquet file, and the number of steps in an epoch."""
    module, file = row_file(folder, ROWS, GROUP), folder / "rows.parquet"

    def groups() -> Iterator[np.ndarray]:
        source = parquet.ParquetFile(file)
        for group in np.random.permutation(source.num_row_groups):
            columns = source.read_row_group(int(group))
            yield np.stack([column.to_numpy() for column in columns.columns], axis=1)

    signature = tf.TensorSpec((None, COLUMNS), tf.float32)
    pipeline = tf.data.Dataset.from_generator(groups, output_signature=signature).unbatch()
    pipeline = pipeline.shuffle(8 * GROUP).batch(ROW_BATCH, num_parallel_calls=tf.data.AUTOTUNE)
    pipeline = pipeline.map(lambda row: (row[:, 1:], row[:, 0])).prefetch(tf.data.AUTOTUNE)

    def by_grain() -> Iterator[Any]:
        records = grain.experimental.ParquetIterDataset(str(file))
        records = grain.experimental.WindowShuffleIterDataset(records, window_size=8 * GROUP, seed=0)
        names = [f"c{n}" for n in range(1, COLUMNS)]

        def pair(row: dict[str, Any]) -> tuple[np.ndarray, Any]:
            return np.array([row[name] for name in names], np.float32), np.float32(row["c0"])

        return iter(records.map(pair).batch(ROW_BATCH))

    peers = {"tf.data": Peer(lambda: iter(pipeline.as_numpy_iterator())), "Grain": Peer(by_grain)}
    return Ours(module, ROW_BATCH), peers, ROWS // ROW_BATCH


def seconds(batches: Callable[[int], Iterator[Any]], steps: int) -> float:
    """The time to read so many batches."""
    began = time.perf_counter()
    for _ in batches(steps):
        pass
    return time.perf_counter() - began


def cpu_seconds() -> float:
    """The CPU time of this process and all below it, which must live on."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


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


def compared(part: str, sides: Sides, rounds: int) -> list[Row]:
    """Measure all sides in turn."""
    ours, peers, steps = sides
    sides_by_name: dict[str, Ours | Peer] = {"edl": ours, **peers}
    found: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in sides_by_name} for what in ("seconds", "cpu", "waiting")
    }
    try:
        for side in sides_by_name.values():
            seconds(side, steps)  # opens the files
        for n in range(rounds):
            say(f"{part}: round {n + 1} of {rounds}")
            for name, side in sides_by_name.items():
                before = cpu_seconds()
                found["seconds"][name].append(seconds(side, steps))
                found["cpu"][name].append(cpu_seconds() - before)
                found["waiting"][name].append(waiting(side, min(steps, STEPS)))
    finally:
        ours.records.close()
    table = []
    for what, label in (("seconds", f"an epoch, {CORES} readers"), ("cpu", "CPU time of an epoch")):
        mine = found[what].pop("edl")
        best = min(found[what], key=lambda name: statistics.median(found[what][name]))
        for name, times in found[what].items():
            goal = "ratio at most 1.05" if name == best else ""
            row = Row(f"{part}: {label}, {name}", mine, times, "s", goal)
            row.met = (row.ratio or 0) <= 1.05 if goal else None
            table.append(row)
    waits = Row(
        f"{part}: waiting in steps of 20 ms, tf.data",
        found["waiting"]["edl"],
        found["waiting"]["tf.data"],
        "%",
        "at most 2 %",
    )
    waits.met = statistics.median(waits.ours) <= 2
    return [*table, waits]


def read_bytes(folder: Path, _rounds: int) -> list[Row]:
    """The bytes that the workers of rings read in an epoch."""
    module = row_file(folder, ROWS, ROWS // RING_GROUPS)
    size = (folder / "rows.parquet").stat().st_size
    table = []
    for ranks in RINGS:
        count = read = 0
        for rank in range(ranks):
            records = opened(module)[1]
            before = psutil.Process().io_counters().read_chars
            for start in range(0, ROWS, ROW_BATCH):
                batch = records.batch(start, min(start + ROW_BATCH, ROWS), StepSlice.even(rank, ranks))
                count += len(batch) if batch else 0
            read += psutil.Process().io_counters().read_chars - before
        assert count == ROWS
        row = Row(f"bytes: read in an epoch, {ranks} workers", [read / size], [], "files", "at most 1.1")
        row.met = row.ours[0] <= 1.1
        table.append(row)
    return table


def first(folder: Path, rounds: int) -> list[Row]:
    """The time to the first batch of many files."""
    module = image_files(folder, FILES)
    times = []
    for n in range(rounds):
        began = time.perf_counter()
        reader, records = opened(module)
        assert len(reader) == FILES
        assert records.batch(n * IMAGE_BATCH, (n + 1) * IMAGE_BATCH, StepSlice.even(0, 1)) is not None
        times.append(time.perf_counter() - began)
    return [Row(f"first: batch of {FILES:,} image files", times, [], "s", "")]


def memory(folder: Path, _rounds: int) -> list[Row]:
    """The memory of a process that reads few records, and of one that reads many."""
    found = []
    for count in (FEW_RECORDS, FEW_RECORDS * TIMES):
        files = folder / str(count)
        files.mkdir()
        with tf.io.TFRecordWriter(str(files / "0.tfrecord")) as writer:
            for n in range(count):
                writer.write(n.to_bytes(4, "little") * (RECORD_BYTES // 4))
        module = written(folder / f"records_{count}.py", RECORDS_MODEL, files)
        program = f"from benchmarks.input import read_epoch; read_epoch({str(module)!r})"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        found.append(float(done.stdout.splitlines()[-1]))
    size = FEW_RECORDS * RECORD_BYTES >> 20
    row = Row(
        f"memory: {size * TIMES} MiB of TFRecord, {size} MiB",
        found[1:],
        found[:1],
        "MiB",
        "ratio at most 1.1",
    )
    row.met = (row.ratio or 0) <= 1.1
    return [row]


def read_epoch(module: str) -> None:
    """Read all records, and print the largest resident memory of this process in MiB."""
    reader, records = opened(Path(module))
    for start in range(0, len(reader), IMAGE_BATCH):
        records.batch(start, min(start + IMAGE_BATCH, len(reader)), StepSlice.even(0, 1))
    peak = next(line for line in open("/proc/self/status", encoding="ascii") if line.startswith("VmHWM"))
    print(int(peak.split()[1]) / 1024)


COMPARED = {"images": images, "rows": rows}
ALONE = {"bytes": read_bytes, "first": first, "memory": memory}


def measure(parts: list[str], rounds: int) -> Iterable[list[Row]]:
    """Measure each part."""
    for part in parts:
        with tempfile.TemporaryDirectory() as folder:
            if part in COMPARED:
                yield compared(part, COMPARED[part](Path(folder)), rounds)
            else:
                yield ALONE[part](Path(folder), rounds)


if __name__ == "__main__":
    sys.exit(main("scripts/bench input", __doc__, [*COMPARED, *ALONE], measure))
