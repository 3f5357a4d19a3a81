# SPDX-License-Identifier: Apache-2.0
"""Files with the records 0, 1, ..., for the model tests/models/counting_files.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SHARDS = 3  # files of records
CLASSES = 3  # folders of images
SIDE = 8  # pixels


def write(directory: Path, form: str, records: int) -> None:
    """Write the records to files.

    Args:
        form: tfrecord or csv; or images, where record i is in the folder of the class i % CLASSES.
    """
    directory.mkdir()
    if form == "images":
        _write_images(directory, records)
        return
    for shard, numbers in enumerate(np.array_split(np.arange(records), SHARDS)):
        if form == "csv":
            lines = "".join(f"{number},row {number}\n" for number in numbers.tolist())
            (directory / f"{shard}.csv").write_text(f"number,text\n{lines}")
        else:
            _write_tfrecord(directory / f"{shard}.tfrecord", numbers)


def numbers_of(images: np.ndarray) -> np.ndarray:
    """Return the records' numbers, int64 [n], that images, uint8 [n, SIDE, SIDE, 3], have as their colour."""
    assert (images == images[:, :1, :1]).all(), "an image has pixels of another"
    return images[:, 0, 0].astype(np.int64) @ np.array([1, 1 << 8, 1 << 16])


def _write_images(directory: Path, records: int) -> None:
    from PIL import Image

    for number in range(records):
        folder = directory / f"class-{number % CLASSES}"
        folder.mkdir(exist_ok=True)
        colour = (number & 255, number >> 8 & 255, number >> 16)
        Image.new("RGB", (SIDE, SIDE), colour).save(folder / f"{number}.png")


def _write_tfrecord(path: Path, numbers: np.ndarray) -> None:
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in numbers.tolist():
            value = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
            example = tf.train.Example(features=tf.train.Features(feature={"number": value}))
            writer.write(example.SerializeToString())
