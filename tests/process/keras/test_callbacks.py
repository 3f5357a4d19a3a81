# SPDX-License-Identifier: Apache-2.0
"""Keras callbacks over rings of one and of two: what `fit` makes of them, epoch for epoch."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks as k

from edl import config
from edl.config import values
from edl.errors import ModelError, UserCodeError
from edl.trainer.agreement.epochs import Epochs, columns
from edl.trainer.callbacks.rules import accepted
from tests.process.keras.callback_jobs import BATCH, EPOCHS, Ours, fitted, model, same, used
from tests.process.keras.models import X, Y


class Halving(k.Callback):
    """A user's own callback, which changes weights, and stops when it has done so often enough."""

    def __init__(self, most: int):
        super().__init__()
        self.times, self.most = 0, most
        self.seen: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        assert logs is not None
        self.seen.append(logs["mae"])
        if epoch % 2:
            bias = self.model.layers[-1].bias
            bias.assign(bias * 0.5 + np.float32(len(self.seen)))
            self.times += 1
            self.model.stop_training = self.times == self.most


CASES: dict[str, Callable[[], list[k.Callback]]] = {
    "none": lambda: [],
    "stops": lambda: [k.EarlyStopping("loss", min_delta=0.02, patience=1)],
    "stops, best weights": lambda: [k.EarlyStopping("val_loss", patience=2, restore_best_weights=True)],
    "best weights, not stopped": lambda: [k.EarlyStopping(patience=99, restore_best_weights=True)],
    "plateau": lambda: [k.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, cooldown=1, min_lr=1e-3)],
    "schedule": lambda: [k.LearningRateScheduler(lambda epoch, rate: rate * 0.8 if epoch else 0.15)],
    "own": lambda: [Halving(3)],
    "several": lambda: [
        k.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch)),
        k.ReduceLROnPlateau("val_loss", patience=1),
        k.EarlyStopping("val_mae", mode="min", patience=3, restore_best_weights=True),
        k.ProgbarLogger(),
        k.History(),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_history_learning_rates_the_last_epoch_and_the_weights_are_those_of_fit(name: str) -> None:
    job = Ours(CASES[name], 1)
    expected = fitted(job)
    same(job.train(), expected)
    job.begin(2)
    same(job.train(), expected)


@pytest.mark.parametrize("older", [False, True])
def test_a_stopped_job_trains_on_with_more_epochs_as_a_further_fit_does(older: bool) -> None:
    """`older`: the checkpoint was written before the call that stopped the training."""
    job = Ours(lambda: [k.EarlyStopping("loss", min_delta=0.02, patience=2)], 1)
    reference, (callback,) = model(), job.make()
    reference.set_weights(job.weights)
    history: dict[str, list[float]] = {}
    for task in (EPOCHS, EPOCHS + 3):
        begun = len(history.get("loss", ()))
        fitting = reference.fit(
            X, Y, BATCH, shuffle=False, initial_epoch=begun, epochs=task, callbacks=[callback], verbose=0
        )
        for name, column in fitting.history.items():
            history.setdefault(name, []).extend(column)
        if task == EPOCHS:
            assert len(history["loss"]) < EPOCHS
    states: list[Epochs] = []
    job.train(lambda job: states.append(job.epochs))
    assert job.epochs.stopped_by
    job.resume(states[-1] if older else job.epochs, EPOCHS + 3)
    job.train()
    found = columns(job.epochs.history)
    assert found["loss"] == pytest.approx(history["loss"], rel=2e-5)
    assert job.epochs.stopped_by == ("" if len(history["loss"]) == EPOCHS + 3 else "EarlyStopping")


@pytest.mark.parametrize("name", ["own", "several"])
def test_who_takes_over_calls_them_as_they_were(name: str) -> None:
    """In each turn another worker, after the one before it has died in the middle of the turn."""
    job = Ours(CASES[name], 2)
    expected = fitted(job)

    def replaced(job: Ours) -> None:
        job.here.run(job.epochs, job.whole, EPOCHS, {})  # no member has applied its update
        job.here = job.worker()

    same(job.train(replaced), expected)


def test_a_turn_that_was_not_taken_over_is_called_again_on_the_same_objects() -> None:
    job = Ours(CASES["several"], 2)
    expected = fitted(job)

    def twice(job: Ours) -> None:
        job.here.run(job.epochs, job.whole, EPOCHS, {})

    same(job.train(twice), expected)
    assert job.turns == len(job.epochs.history) + 1


def test_a_log_has_each_epoch_once_though_its_writer_was_replaced(tmp_path: Path) -> None:
    loggers: list[k.CSVLogger] = []

    def make() -> list[k.Callback]:
        loggers.append(k.CSVLogger(tmp_path / "log.csv"))
        return [loggers[-1]]

    def replaced(job: Ours) -> None:
        for _ in range(2):
            job.here.run(job.epochs, job.whole, EPOCHS, {})
        loggers[-1].csv_file.close()
        job.here = job.worker()

    job = Ours(make, 2).train(replaced)
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == list(range(EPOCHS))
    assert [float(row["val_loss"]) for row in rows] == [h["val_loss"] for h in job.epochs.history]


def test_files_of_models_are_those_of_each_epoch(tmp_path: Path) -> None:
    seen: list[np.ndarray] = []
    look = k.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(job.weights[0]))

    def make() -> list[k.Callback]:
        return [
            look,
            k.ModelCheckpoint(tmp_path / "{epoch}-{val_loss:.2f}.keras"),
            k.ModelCheckpoint(tmp_path / "best.weights.h5", save_best_only=True, save_weights_only=True),
        ]

    job: Ours = Ours(make, 1)
    job.train()
    for epoch, history in enumerate(job.epochs.history):
        saved = keras.models.load_model(tmp_path / f"{epoch + 1}-{history['val_loss']:.2f}.keras")
        np.testing.assert_array_equal(saved.get_weights()[0], seen[epoch])
    best = model()
    best.optimizer.build(best.trainable_variables)
    best.load_weights(tmp_path / "best.weights.h5")
    first = int(np.argmin([h["val_loss"] for h in job.epochs.history]))
    np.testing.assert_array_equal(best.get_weights()[0], seen[first])


def test_tensorboard_shows_what_keras_would_and_the_ring(tmp_path: Path) -> None:
    job = Ours(lambda: [k.TensorBoard(tmp_path)], 2).train()
    points: dict[tuple[str, str], list[float]] = {}
    for file in sorted(tmp_path.glob("*/events.*")):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                assert value.metadata.plugin_data.plugin_name in ("scalars", "")
                points.setdefault((file.parent.name, value.tag), []).append(
                    float(tf.make_ndarray(value.tensor))
                )
    history = columns(job.epochs.history)
    assert points.pop(("ring", "ring_size")) == [2.0] * EPOCHS
    assert points.pop(("train", "epoch_learning_rate")) == pytest.approx([0.1] * EPOCHS)
    assert points.keys() == {
        (run, f"epoch_{name}") for run in ("train", "validation") for name in ("loss", "mae")
    }
    assert points["validation", "epoch_mae"] == pytest.approx(history["val_mae"])


def test_a_callback_that_evaluates_the_model_leaves_no_trace_in_the_metrics() -> None:
    class Evaluates(k.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.evaluate(X, Y, verbose=0)

    looked, plain_job = Ours(lambda: [Evaluates()], 2), Ours(lambda: [], 2)
    plain_job.learner.load(looked.learner.state())
    assert looked.train().epochs.history == plain_job.train().epochs.history


def test_one_that_raises_is_named_with_its_hook_and_epoch() -> None:
    def fails(epoch: int, logs: Any) -> None:
        if epoch == 2:
            raise ValueError("of mine")

    with pytest.raises(UserCodeError) as told:
        Ours(lambda: [k.LambdaCallback(on_epoch_end=fails)], 1).train()
    assert str(told.value) == "callback LambdaCallback: on_epoch_end() of epoch 3 raised ValueError: of mine"
    assert isinstance(told.value.__cause__, ValueError)


class Odd(k.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...


class Held(k.Callback):
    def on_test_begin(self, logs: Any = None) -> None: ...


class Uploading(k.ModelCheckpoint):
    """One's own, as trackers of experiments have it."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)


class UploadingOften(Uploading):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a hook of batches": (Odd, r"Odd.on_train_batch_end\(\) cannot be honoured"),
    "the older hook": (lambda: k.LambdaCallback(on_batch_end=print), r"LambdaCallback.on_batch_end\(\)"),
    "LambdaCallback": (
        lambda: k.LambdaCallback(on_train_batch_begin=print),
        r"LambdaCallback.on_train_batch_b",
    ),
    "a hook of tests": (Held, r"Held.on_test_begin\(\) cannot be honoured"),
    "files by batches": (
        lambda: k.ModelCheckpoint("a.keras", save_freq=5),
        r"ModelCheckpoint\(save_freq=5\)",
    ),
    "files of one's own, by batches": (
        lambda: Uploading("a.keras", save_freq=5),
        r"Uploading\(save_freq=5\)",
    ),
    "more than files, by batches": (
        lambda: UploadingOften("a.keras"),
        r"UploadingOften.on_train_batch_end\(\) cannot be honoured",
    ),
    "averages": (k.SwapEMAWeights, "SwapEMAWeights .* use_ema"),
    "backup": (lambda: k.BackupAndRestore("there"), "BackupAndRestore .* set checkpoint.dir"),
    "histograms": (lambda: k.TensorBoard(histogram_freq=1), r"TensorBoard\(histogram_freq=1\)"),
    "points of batches": (lambda: k.TensorBoard(update_freq="batch"), r"TensorBoard\(update_freq=1\)"),
    "no callback": (lambda: print, "must return Keras callbacks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_that_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    make, why = REFUSED[name]
    with pytest.raises(ModelError, match=why):
        used(make())


def test_a_class_derived_from_one_that_saves_files_is_called() -> None:
    assert [type(one) for one in used(Uploading("a.keras"))] == [Uploading]


@pytest.mark.filterwarnings("default")  # of the packages while they are imported
def test_a_tracker_of_experiments_may_log_epochs_and_not_batches() -> None:
    import mlflow.keras
    import wandb
    from wandb.integration.keras import WandbMetricsLogger

    class Often(mlflow.keras.MlflowCallback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...

    wandb.init(mode="disabled")
    assert len(used([WandbMetricsLogger(), mlflow.keras.MlflowCallback()])) == 2
    steps = mlflow.keras.MlflowCallback(log_every_epoch=False, log_every_n_steps=5)
    refusals = {
        WandbMetricsLogger("batch"): r'WandbMetricsLogger\(log_freq=1\) cannot .* log_freq="epoch"',
        steps: r"MlflowCallback\(log_every_n_steps=5\) cannot .* log_every_epoch=True",
        Often(): r"Often.on_train_batch_end\(\) cannot be honoured",
    }
    for refused, why in refusals.items():
        with pytest.raises(ModelError, match=why):
            used(refused)


def test_what_edl_does_itself_is_left_to_it_with_a_word() -> None:
    told: list[str] = []
    kept = config.parse(values.load([], ["checkpoint.dir=there"]))
    given = [k.TerminateOnNaN(), k.BackupAndRestore("there"), k.ProgbarLogger(), [k.RemoteMonitor()]]
    assert [type(one) for one in accepted(given, kept, told.append)] == [k.RemoteMonitor]
    assert told == [
        "TerminateOnNaN is not called: training.onNonFinite=stop does what it is for",
        "BackupAndRestore is not called: checkpoint.dir does what it is for",
    ]
    skips = config.parse(values.load([], ["training.onNonFinite=skip"]))
    with pytest.raises(ModelError, match="TerminateOnNaN contradicts"):
        accepted(k.TerminateOnNaN(), skips, told.append)
