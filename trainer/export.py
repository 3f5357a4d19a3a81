"""The end of a job: evaluate the model on what was held out, and save it whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import keras
import numpy as np

from edl.contract.shuffle import Order
from edl.data import Reader
from trainer.records import Records
from trainer.user_model import UserModel

EVALUATION_BATCH = 256


class _Batches(keras.utils.PyDataset):
    """A reader's records as Keras wants to be given them."""

    def __init__(self, source: Records, size: int):
        super().__init__()
        self._source, self._size = source, size

    def __len__(self) -> int:
        return -(-self._size // EVALUATION_BATCH)

    def __getitem__(self, index: int) -> tuple[object, ...]:
        start = index * EVALUATION_BATCH
        batch = self._source.plain(start, min(start + EVALUATION_BATCH, self._size))
        return (batch.x, batch.y) if batch.weights is None else (batch.x, batch.y, batch.weights)


def evaluate(model: keras.Model, zoo: UserModel, reader: Reader | None) -> dict[str, float]:
    """The compiled loss and metrics over the held-out records; empty when there are none."""
    if reader is None or len(reader) == 0:
        return {}
    order = Order(len(reader), seed=0, block=EVALUATION_BATCH, shuffle=False)
    source = Records(reader, order, zoo.feed, zoo.name)
    results = model.evaluate(_Batches(source, len(reader)), verbose=0, return_dict=True)
    return {name: float(np.mean(value)) for name, value in results.items()}


def save(model: keras.Model, directory: Path, worker: int) -> str:
    """Save as `model.keras` in `directory`; a reader sees the old file, none, or the whole new one."""
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f".model.{worker}.keras"
    model.save(unfinished)
    with open(unfinished, "rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, directory / "model.keras")
    return "model.keras"
