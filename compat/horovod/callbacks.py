# SPDX-License-Identifier: Apache-2.0
"""hvd.callbacks, for the Keras that `tf.keras` is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

keras: Any = tf.keras


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcast the variables of the model and its optimizer after the first batch of a training."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None):
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.broadcast_done = False
        self._local = {variable.ref() for variable in local_variables or ()}

    def register_local_var(self, var: Any) -> None:
        """Leave a variable out of the broadcast."""
        self._local.add(var.ref())

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        variables = [*self.model.variables, *self.model.optimizer.variables]
        unique = {v.ref(): v for v in variables if v.ref() not in self._local}
        with tf.device(self.device):
            hvd.broadcast_variables(list(unique.values()), root_rank=self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Replace the metrics of an epoch by their mean over all ranks, for the callbacks that follow."""

    def __init__(self, device: str = ""):
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        names = sorted(name for name, value in (logs or {}).items() if _is_number(value))
        if logs is None or not names:
            return
        values = tf.constant([float(logs[name]) for name in names], tf.float64)
        with tf.device(self.device):
            means = hvd.allreduce(values, op=hvd.Average, name="HorovodAllreduce_metrics").numpy()
        logs.update(zip(names, map(float, means), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiply the initial learning rate by a number that depends on the epoch.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch; or the factor of a decay for each epoch since `start_epoch`.
        start_epoch, end_epoch: the first epoch with this schedule, and the first without; None: no end.
        staircase: whether the rate changes at the beginning of epochs only; else with each batch.
        momentum_correction: whether momentum is scaled like the rate for the batch of a change.
        steps_per_epoch: batches in an epoch; by default those that Keras counts.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        if initial_lr is None:
            raise ValueError(f"{type(self).__name__}: initial_lr is missing")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch, self.epoch = steps_per_epoch, 0
        self._usual_momentum: float | None = None
        if callable(multiplier):
            self.multiplier: Callable[[float], float] = multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(f"{type(self).__name__}: Keras does not know steps_per_epoch; pass it here")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.epoch < self.start_epoch or (self.end_epoch is not None and self.epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self.epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self.epoch)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._usual_momentum is not None:
            self.model.optimizer.momentum = self._usual_momentum
            self._usual_momentum = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate

    @property
    def _rate(self) -> float:
        return float(self.model.optimizer.learning_rate)

    def _adjust(self, epoch: float) -> None:
        """Set the learning rate of this time, in epochs."""
        optimizer, before = self.model.optimizer, self._rate
        optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)
        # A compiled step has the momentum as a constant.
        compiled = not self.model.run_eagerly
        if self.momentum_correction and not compiled and getattr(optimizer, "momentum", None) and before:
            self._usual_momentum = float(optimizer.momentum)
            optimizer.momentum = self._usual_momentum * self._rate / before


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from `initial_lr` / size to `initial_lr` during the first epochs."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        self.verbose = verbose

        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            reached = (epoch + 1 / self.steps_per_epoch) / warmup_epochs  # at the end of this batch
            return (1 + reached * (hvd.size() - 1)) / hvd.size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=int(warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the warm-up has reached the learning rate {self._rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Save the model of each epoch that is the best so far. Set `filepath` before the training."""

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", save_freq: str = "epoch"
    ):
        super().__init__(
            "best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
        )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
