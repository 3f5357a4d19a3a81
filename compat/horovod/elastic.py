# SPDX-License-Identifier: Apache-2.0
"""hvd.elastic: states that outlive a ring, `run`, and the callbacks that commit.

A state is saved in host memory at each commit. When a ring breaks, each survivor restores its last commit.
At the beginning of each ring all members receive the state of rank 0, which holds the most commits.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from edl.compat.horovod import member, objects
from edl.trainer.model import snapshot

keras: Any = tf.keras
P = ParamSpec("P")
R = TypeVar("R")


class State:
    """What the members of a ring share. Subclasses define `save`, `restore` and `sync`.

    Args:
        bcast_object, get_rank: accepted as in Horovod; the ring has its own.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None):
        self._reset_callbacks: list[Callable[[], None]] = []
        self._host_messages = _HostMessages()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these functions after each change of the ring, before the state is synchronized."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Handle a change of the ring."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state in host memory, and leave the ring here if its members change.

        Raises:
            HostsUpdatedInterrupt: caught by `run`.
        """
        self.save()
        member.current().committed()

    def check_host_updates(self) -> None:
        """Leave the ring here if its members change; the state is saved then.

        Raises:
            HostsUpdatedInterrupt: caught by `run`.
        """
        member.current().check(self.save)

    def save(self) -> None:
        """Save the state in host memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Set the state to the one that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Receive the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for a changed ring; called before the reset callbacks."""


class _HostMessages:
    """Stands for the queue in which Horovod's driver announces changes: some scripts wait for it."""

    def empty(self) -> bool:
        """Whether no change of the ring is due."""
        return not member.current().must_leave


class ObjectState(State):
    """Python objects, each an attribute of the state."""

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any):
        super().__init__(bcast_object, get_rank)
        self._names = tuple(kwargs)
        self.__dict__.update(kwargs)
        self._saved: dict[str, Any] = {}
        ObjectState.save(self)

    def save(self) -> None:
        # Copies: a list that a script appends to would change in the saved state, too.
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        self.__dict__.update(copy.deepcopy(self._saved))

    def sync(self) -> None:
        if self._names:
            values = {name: getattr(self, name) for name in self._names}
            self.__dict__.update(objects.broadcast_object(values, 0, name="state"))
        self.save()


class TensorFlowState(ObjectState):
    """Variables and Python objects."""

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any):
        self._listed = None if variables is None else list(variables)
        self._values: dict[Any, Any] = {}  # by reference to the variable
        super().__init__(**kwargs)
        self.save()

    @property
    def _variables(self) -> Sequence[Any]:
        return self._listed or ()

    def save(self) -> None:
        super().save()
        self._values = {variable.ref(): snapshot.in_host_memory(variable) for variable in self._variables}

    def restore(self) -> None:
        super().restore()
        for variable in self._variables:
            # An optimizer makes its variables at its first update, of zeros.
            saved = self._values.get(variable.ref())
            variable.assign(tf.zeros(variable.shape, variable.dtype) if saved is None else saved)

    def sync(self) -> None:
        member.current().broadcast(self._variables)
        super().sync()


class TensorFlowKerasState(TensorFlowState):
    """A model, its optimizer, and Python objects."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any):
        self.model = model
        self.optimizer = optimizer or model.optimizer
        # As on the members that have trained. Legacy optimizers of Keras 2 have an own name for it.
        of_keras2 = getattr(self.optimizer, "_create_all_weights", None)
        build = getattr(self.optimizer, "build", of_keras2)
        if model.built and build is not None and not getattr(self.optimizer, "built", False):
            build(model.trainable_variables)
        super().__init__(**kwargs)

    @property
    def _variables(self) -> Sequence[Any]:
        optimizer = getattr(self.optimizer, "variables", ())
        return [*self.model.variables, *(optimizer() if callable(optimizer) else optimizer)]


def run(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of a state: it is called once for each ring, until it returns."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        state: Any = args[0] if args else kwargs["state"]
        result: R = member.current().run(state, lambda: func(*args, **kwargs))
        return result

    return wrapper


class CommitStateCallback(keras.callbacks.Callback):
    """Commit the state every few batches, and after each epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1):
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._batches = 0

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._batches == self.batches_per_commit:
            self._batches = 0
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keep the number of the batch in `state.batch`, 0 after each epoch.

    Keras does not let a callback shorten an epoch: an epoch that was interrupted is trained in full.
    """

    def __init__(self, state: Any):
        super().__init__()
        self.state = state

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keep the number of completed epochs, over all rings, in `state.epoch`."""

    def __init__(self, state: Any):
        super().__init__()
        self.state, self._first = state, state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self._first = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._first + epoch + 1


KerasState = TensorFlowKerasState
