"""A feed(records, split) that treats training records differently: only the training sees the difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl import config
from edl.config import values
from edl.contract.layout import Part
from edl.contract.steps import Steps
from tests.process.keras.rings import Meeting, ring_step
from trainer.build import evaluation_of
from trainer.epochs import Epochs, columns
from trainer.export import evaluate
from trainer.exports import samples
from trainer.learner import KerasLearner
from trainer.records import Records
from trainer.user_model import UserModel, load
from trainer.watchdog import uncounted, unwatched

EPOCHS, BATCH, RECORDS, HELD_OUT = 3, 12, 30, 21
CLASS_WEIGHT = {0: 1.0, 1: 5.0, 2: 0.25}
SOURCE = f"""
import keras
import numpy as np

import edl

WEIGHTS = np.array({list(CLASS_WEIGHT.values())})

def model():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(name="weighted", from_logits=True)],
    )
    return model

def data(split):
    chance = np.random.default_rng(len(split))
    size = {{"train": {RECORDS}, "test": {HELD_OUT}}}[split]
    return edl.arrays(chance.normal(size=(size, 4)).astype("f4"), chance.integers(0, 3, size))

def feed(records, split):
    x, labels = records
    return (x, labels, WEIGHTS[labels]) if split == "train" else (x, labels)
"""
CONFIG = config.parse(values.defaults() | {"evaluation": values.defaults()["evaluation"] | {"batchSize": 8}})


@pytest.fixture
def module(tmp_path: Path) -> UserModel:
    file = tmp_path / "weighs_classes.py"
    file.write_text(SOURCE)
    return load(str(file))


def arrays(module: UserModel, split: str) -> Any:
    reader = module.reader(split)
    assert reader is not None
    return reader.read(0, len(reader))


@pytest.mark.parametrize("size", [1, 2])
def test_class_weights_give_the_history_of_fit_with_class_weight_and_validation_data(
    module: UserModel, size: int
) -> None:
    reference = module.model()
    expected = reference.fit(
        *arrays(module, "train"), batch_size=BATCH, epochs=EPOCHS, shuffle=False, class_weight=CLASS_WEIGHT,
        validation_data=arrays(module, "test"), validation_batch_size=7, verbose=0,
    )  # fmt: skip

    reader = module.reader("train")
    assert reader is not None
    records = Records(reader, module.feed_of("train"), module.name)
    tried = [records.these(range(5)), records.these([0])]
    meeting, said = Meeting(), list[str]()
    learner = KerasLearner(module.model(), tried[0], tried[1:], reduce=meeting.reduce)
    steps = Steps(RECORDS, BATCH)
    evaluation = evaluation_of(CONFIG, module, learner, tried, steps, unwatched, said.append, uncounted)
    assert evaluation is not None
    parts, epochs = [Part.even(rank, size) for rank in range(size)], Epochs()
    for step in range(EPOCHS * steps.per_epoch):
        start, stop = (place % RECORDS for place in steps.positions(step))
        batches = [records.batch(start, stop or RECORDS, part) for part in parts]
        agreed = ring_step(learner, meeting, batches, step)
        epochs = epochs.after(agreed.loss, agreed.records)
        for now in evaluation.after(step + 1, EPOCHS):
            epochs = epochs.whole(learner.take_metrics())
            totals: Any = 0.0
            for part in parts:
                evaluation.take(part)
                for round in range(now.first, now.end):
                    totals = totals + np.float64(evaluation.part(now, round)[0])
            epochs = epochs.evaluated(evaluation.results(now.split, totals))
    found = columns(epochs.history)
    assert found.keys() == expected.history.keys()
    for name, column in expected.history.items():
        assert found[name] == pytest.approx(column, rel=1e-5, abs=1e-6), name
    assert said == []


def test_the_final_evaluation_and_the_samples_of_exports_are_those_of_the_held_out_records(
    module: UserModel,
) -> None:
    model, (x, labels) = module.model(), arrays(module, "test")
    expected = model.evaluate(x, labels, verbose=0, return_dict=True)
    assert evaluate(model, module, module.reader("test"), unwatched) == pytest.approx(expected, rel=1e-6)

    def doubled(records: Any, split: str) -> Any:
        return (records[0] * 2, records[1]) if split == "train" else records

    augmented = UserModel("mine", module.model, module.data, doubled)
    np.testing.assert_array_equal(samples.features_of(augmented), x[: samples.RECORDS])
