# SPDX-License-Identifier: Apache-2.0
"""Arguments of `fit`, as the functions of a model's module and values of the job express them: the history of
a ring is that of `fit`, epoch for epoch, `val_` included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest

import edl
from edl import config
from edl.config import values
from edl.contract.layout import StepSlice
from edl.contract.steps import Steps
from edl.trainer.agreement.epochs import Epochs, columns
from edl.trainer.evaluation.local_evaluation import evaluate
from edl.trainer.export import samples
from edl.trainer.model.user_model import UserModel
from edl.trainer.records.records import Records
from edl.trainer.runtime.watchdog import uncounted, unwatched
from edl.trainer.start.build import evaluation_of
from edl.trainer.step.learner import KerasLearner
from tests.process.keras.rings import Meeting, ring_step

EPOCHS, BATCH, RING = 4, 12, 2
chance = np.random.default_rng(0)
X, LABELS = chance.normal(size=(51, 4)).astype("f4"), chance.integers(0, 3, 51)
WEIGHTS = np.linspace(0.1, 2, 51).astype("f4")
TRAIN, TEST = slice(0, 30), slice(30, 51)
CLASS_WEIGHT = {0: 1.0, 1: 5.0, 2: 0.25}


def model() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weighted = keras.metrics.SparseCategoricalCrossentropy(name="weighted", from_logits=True)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.5),
        crossentropy,
        metrics=["accuracy"],
        weighted_metrics=[weighted],
    )
    return model


def of(records: slice, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(array[records] for array in arrays)


def weigh_classes(records: Any, split: str) -> Any:
    x, labels = records
    weights = np.array([CLASS_WEIGHT[label] for label in labels.tolist()])
    return (x, labels, weights) if split == "train" else (x, labels)


@dataclass(frozen=True)
class Call:
    """A call of `fit`, and what stands for it in a job.

    Args:
        given: arguments of `fit`.
        arrays: the arrays of each split's reader.
        evaluation: values of the job, by the keys below `evaluation`.
        evaluated: the epochs whose history has `val_`.
    """

    given: Mapping[str, Any]
    arrays: Mapping[str, tuple[np.ndarray, ...]]
    feed: Any = None
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    evaluated: tuple[int, ...] = (0, 1, 2, 3)


HELD_OUT = {"validation_data": of(TEST, X, LABELS)}
SPLITS = {"train": of(TRAIN, X, LABELS), "validation": of(TEST, X, LABELS)}
CASES = {
    "class_weight": Call(
        dict(zip("xy", of(TRAIN, X, LABELS), strict=True)) | {"class_weight": CLASS_WEIGHT, **HELD_OUT},
        SPLITS,
        weigh_classes,
    ),
    "sample_weight": Call(
        dict(zip(("x", "y", "sample_weight"), of(TRAIN, X, LABELS, WEIGHTS), strict=True))
        | {"validation_data": of(TEST, X, LABELS, WEIGHTS)},
        {"train": of(TRAIN, X, LABELS, WEIGHTS), "validation": of(TEST, X, LABELS, WEIGHTS)},
    ),
    "validation_split": Call({"x": X, "y": LABELS, "validation_split": 21 / 51}, SPLITS),
    "validation_steps": Call(
        dict(zip("xy", of(TRAIN, X, LABELS), strict=True)) | {"validation_steps": 2, **HELD_OUT},
        SPLITS | {"validation": of(slice(30, 30 + 2 * 7), X, LABELS)},
    ),
    "validation_freq": Call(
        dict(zip("xy", of(TRAIN, X, LABELS), strict=True)) | {"validation_freq": 2, **HELD_OUT},
        SPLITS,
        evaluation={"epochs": 2},
        evaluated=(1, 3),
    ),
}


def module_of(call: Call) -> UserModel:
    data = lambda split: edl.arrays(*call.arrays[split]) if split in call.arrays else None  # noqa: E731
    return UserModel("mine", model, data, call.feed)


@pytest.mark.parametrize("name", CASES)
def test_the_history_is_that_of_fit(name: str) -> None:
    call = CASES[name]
    expected = model().fit(
        **call.given, batch_size=BATCH, epochs=EPOCHS, shuffle=False, validation_batch_size=7, verbose=0
    )
    module, meeting, said = module_of(call), Meeting(), list[str]()
    reader = module.reader("train")
    assert reader is not None
    records = Records(reader, module.feed_of("train"), module.name)
    tried = [records.batch_at(range(5)), records.batch_at([0])]
    learner = KerasLearner(model(), tried[0], tried[1:], reduce=meeting.reduce)
    steps, parts = Steps(len(reader), BATCH), [StepSlice.even(rank, RING) for rank in range(RING)]
    chosen = values.defaults()["evaluation"] | {"batchSize": 8} | call.evaluation
    job = config.parse(values.defaults() | {"evaluation": chosen})
    evaluation = evaluation_of(job, module, learner, tried, steps, unwatched, said.append, uncounted, reader)
    assert evaluation is not None

    epochs = Epochs()
    for step in range(EPOCHS * steps.per_epoch):
        start = steps.begins_at(step)
        stop = steps.begins_at(step + 1)
        agreed = ring_step(learner, meeting, [records.batch(start, stop, part) for part in parts], step)
        epochs = epochs.after(agreed.loss, agreed.records)
        if steps.ends_epoch(step + 1):
            epochs = epochs.whole(learner.take_metrics())
        for now in evaluation.after(step + 1, EPOCHS):
            totals = np.zeros(1)
            for part in parts:
                evaluation.take(part)
                for round in range(now.first, now.end):
                    totals = totals + np.float64(evaluation.part(now, round)[0])
            epochs = epochs.evaluated(evaluation.results(now.split, totals))

    found = columns(epochs.history)
    assert found.keys() == expected.history.keys()
    for name, column in expected.history.items():
        here = call.evaluated if name.startswith("val_") else range(EPOCHS)
        assert [found[name][epoch] for epoch in here] == pytest.approx(column, rel=1e-5, abs=1e-6), name
    assert said == []


def test_the_final_evaluation_and_the_samples_of_exports_are_of_the_held_out_split() -> None:
    trained, module = model(), module_of(CASES["class_weight"])
    expected = trained.evaluate(*of(TEST, X, LABELS), verbose=0, return_dict=True)
    assert evaluate(trained, module, module.reader("validation"), unwatched) == pytest.approx(
        expected, rel=1e-6
    )

    def double(records: Any, split: str) -> Any:
        return (records[0] * 2, records[1]) if split == "train" else records

    augmented = UserModel("mine", model, module.data, double)
    np.testing.assert_array_equal(samples.features_of(augmented), X[TEST][: samples.RECORDS])
