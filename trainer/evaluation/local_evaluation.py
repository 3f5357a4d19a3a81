# SPDX-License-Identifier: Apache-2.0
"""Evaluates a model on one worker, with Keras' own `evaluate`; see evaluation.py for the ring."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import keras

from edl.contract.evaluation import VALIDATION
from edl.contract.ranges import Range
from edl.data import Reader
from edl.trainer.agreement.metric_values import Value, values_of
from edl.trainer.model.user_model import UserModel
from edl.trainer.records.records import Records
from edl.trainer.runtime.watchdog import Watch

EVALUATION_BATCH = 256  # records


class _Batches(keras.utils.PyDataset):
    """A reader's records as Keras wants to be given them.

    Args:
        goes_on: is called with each batch.
    """

    def __init__(self, source: Records, batches: Sequence[Range], goes_on: Callable[[], None]):
        super().__init__()
        self._source, self._batches, self._goes_on = source, batches, goes_on

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[object, ...]:
        self._goes_on()
        batch = self._source.consecutive(*self._batches[index])
        # tf.data, through which Keras takes them, knows no lists, and has no type for labels that are None.
        batch = replace(batch, x=keras.tree.lists_to_tuples(batch.x), y=keras.tree.lists_to_tuples(batch.y))
        if batch.weights is not None:
            return batch.x, batch.y, batch.weights
        return (batch.x,) if batch.y is None else (batch.x, batch.y)


@contextlib.contextmanager
def _own_step_given_as_by_fit(model: keras.Model) -> Iterator[None]:
    """Inside this context, a model's own `test_step` gets features alone if there are no labels.

    `fit` does the same.
    """
    if type(model).test_step is keras.Model.test_step:
        yield
        return
    own, unpacked, packed = (
        model.test_step,
        keras.utils.unpack_x_y_sample_weight,
        keras.utils.pack_x_y_sample_weight,
    )
    model.test_step = lambda data: own(packed(*unpacked(data)))
    model.test_function = None  # which has the step as it was
    try:
        yield
    finally:
        del model.test_step
        model.test_function = None


def evaluate(
    model: keras.Model,
    zoo: UserModel,
    reader: Reader | None,
    watch: Watch,
    batches: Sequence[Range] | None = None,
    split: str = VALIDATION,
) -> dict[str, Value]:
    """The compiled loss and metrics over the held-out records; empty without held-out records.

    Args:
        reader: the reader of `split`.
        watch: wraps each call of the user's code that reads.
        batches: ranges of record indices; None for all records.
    """
    size = 0 if reader is None else len(reader)
    if reader is None or size == 0:
        return {}
    transform = zoo.transform_of(split)
    source = Records(reader, zoo.feed_of(split), zoo.name, watch, transform=transform)
    if batches is None:
        starts = range(0, size, EVALUATION_BATCH)
        batches = [(start, min(start + EVALUATION_BATCH, size)) for start in starts]
    with (
        watch(
            lambda: f"the evaluation of a batch of {zoo.source(split)} by the worker that saves the model"
        ) as call,
        _own_step_given_as_by_fit(model),
    ):
        results = model.evaluate(_Batches(source, batches, call.goes_on), verbose=0, return_dict=True)
    return values_of(results)
