# SPDX-License-Identifier: Apache-2.0
"""Which Keras callbacks make sense over a ring, and which are refused, by name, with what to do instead.

Callbacks are called at the boundaries of epochs, on one worker. So what needs a batch's moment cannot be
honoured: it would see a part of each step, on one of many workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras import callbacks as k

from edl.config import Config
from edl.errors import ModelError
from edl.trainer.callbacks.tensorboard import Scalars

HOOKS = ("on_train_begin", "on_epoch_begin", "on_test_end", "on_epoch_end", "on_train_end")  # that are called
# fit() calls them, too, but here there is no such moment. (It never calls those of predict().)
BATCHES = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
TESTS = ("on_test_begin", "on_test_batch_begin", "on_test_batch_end")
# Options of TensorBoard that need more than the numbers of an epoch; and their value when they are off.
TENSORBOARD = {
    "histogram_freq": 0,
    "write_images": False,
    "write_steps_per_second": False,
    "update_freq": "epoch",
    "embeddings_freq": 0,
    "_should_trace": False,
}
INSTEAD: dict[type, str] = {
    k.SwapEMAWeights: "the averages of use_ema replace the weights at the end of the training by themselves",
    k.OrbaxCheckpoint: "checkpoint.dir writes checkpoints, and the job goes on from them",
}

# Callbacks of experiment trackers, by package and class: the attribute that is None if they log only epochs,
# and the setting that makes it so. Their hooks of batches do nothing then, and need not be called.
TRACKERS = {
    ("wandb", "WandbMetricsLogger"): ("log_freq", 'log_freq="epoch"'),
    ("mlflow", "MlflowCallback"): ("log_every_n_steps", "log_every_epoch=True"),
}


def name_of(callback: Any) -> str:
    """Return the callback's class name, by which messages and memories identify it."""
    return type(callback).__name__


def is_overridden(callback: k.Callback, hook: str) -> bool:
    """Whether a method is overridden in the callback's class, or on the object, as LambdaCallback does."""
    return not getattr(getattr(callback, hook), "_is_default", False)  # Keras' own mark


def accepted(given: Any, config: Config, notify: Callable[[str], None]) -> list[k.Callback]:
    """Return the user's callbacks that edl calls.

    Args:
        notify: takes a message about each callback that edl replaces, because edl does its work.

    Raises:
        ModelError: a callback cannot be honoured.
    """
    found = []
    for callback in _flat(given):
        if not isinstance(callback, k.Callback):
            raise ModelError(
                f"callbacks() must return Keras callbacks (a list of keras.callbacks.Callback), not "
                f"{name_of(callback)}"
            )
        if (use := _used(callback, config, notify)) is not None:
            found.append(use)
    return found


def _flat(given: Any) -> Iterable[Any]:
    if given is None:
        return []
    if isinstance(given, k.CallbackList):
        given = given.callbacks
    return keras.tree.flatten(given)


def _used(callback: Any, config: Config, notify: Callable[[str], None]) -> k.Callback | None:
    """The callback, or its replacement; None if edl does its work.

    Raises:
        ModelError: the callback cannot work over a ring.
    """
    name, kind = name_of(callback), type(callback)
    for other, instead in INSTEAD.items():
        if isinstance(callback, other):
            raise ModelError(f"callbacks(): {name} cannot be honoured over a ring: {instead}")
    if kind is k.ProgbarLogger:
        return None
    if kind is k.TerminateOnNaN:
        if config.training.on_non_finite != "stop":
            raise ModelError(
                f"callbacks(): {name} contradicts training.onNonFinite={config.training.on_non_finite}; "
                "training.onNonFinite=stop ends the job at a loss or gradient that is not finite"
            )
        notify(f"{name} is not called: training.onNonFinite=stop does what it is for")
        return None
    if kind is k.BackupAndRestore:
        if not config.checkpoint.dir:
            raise ModelError(
                f"callbacks(): {name} cannot be honoured over a ring; set checkpoint.dir, and a job that was "
                "interrupted goes on from its checkpoints"
            )
        notify(f"{name} is not called: checkpoint.dir does what it is for")
        return None
    if kind is k.TensorBoard:
        return _scalars(callback)
    if isinstance(callback, k.ModelCheckpoint) and callback.save_freq != "epoch":
        raise ModelError(
            f"callbacks(): {name}(save_freq={callback.save_freq!r}) cannot be honoured over a ring: "
            'callbacks are called between epochs, so save_freq must be "epoch" (checkpoint.steps writes '
            "checkpoints every so many steps)"
        )
    tracker, attribute, setting = _tracker(callback)
    if tracker is not None and (value := getattr(callback, attribute)) is not None:
        raise ModelError(
            f"callbacks(): {name}({attribute}={value!r}) cannot be honoured over a ring: callbacks are "
            f"called between epochs; use {setting}"
        )
    idle = tracker if tracker is not None else k.ModelCheckpoint  # with save_freq="epoch"
    for hook in (*BATCHES, *TESTS):
        if is_overridden(callback, hook) and not _is_idle(callback, hook, idle):
            raise ModelError(
                f"callbacks(): {name}.{hook}() cannot be honoured over a ring: callbacks are called between "
                f"epochs, on one worker ({', '.join(HOOKS)})"
            )
    return callback


def _tracker(callback: k.Callback) -> tuple[type | None, str, str]:
    """The class of an experiment tracker that the callback has or is derived from, as in `TRACKERS`."""
    for kind in type(callback).__mro__:
        if found := TRACKERS.get((kind.__module__.partition(".")[0], kind.__name__)):
            return kind, *found
    return None, "", ""


def _is_idle(callback: k.Callback, hook: str, kind: type) -> bool:
    """Whether the hook is that of `kind`, a callback whose hooks of batches and tests do nothing."""
    return (
        isinstance(callback, kind)
        and getattr(type(callback), hook) is getattr(kind, hook)
        and hook not in vars(callback)
    )


def _scalars(board: Any) -> Scalars:
    for option, off in TENSORBOARD.items():
        if (value := getattr(board, option)) != off:
            what = "profile_batch" if option == "_should_trace" else f"{option}={value!r}"
            raise ModelError(
                f"callbacks(): TensorBoard({what}) cannot be honoured over a ring: only the numbers of each "
                "epoch are written"
            )
    return Scalars(board.log_dir)
