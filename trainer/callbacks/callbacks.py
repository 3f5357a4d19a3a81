# SPDX-License-Identifier: Apache-2.0
"""The user's Keras callbacks: called at the boundaries of epochs, on one worker, for the whole ring.

    run     at an epoch's boundary: on_epoch_end of the one that is whole, on_epoch_begin of the next
    end     after the last one: on_train_end, on the worker that saves the model

Promise: `run` changes nothing. It returns what the callbacks have changed (weights, learning rate, whether
training goes on) and what they remember, and restores the model. All ranks apply that update together, or
none does, and then the calls have not happened: the next rank that calls the callbacks restores them as
they were before. So callbacks live as long as the job, on any worker.

What a callback remembers are its attributes that are plain values (trainer/runtime/serialization.py), where
they are not those that it was made with. Everything else, such as an open file, is made anew by callbacks()
and on_train_begin() in each process that calls them.
"""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from keras import callbacks as k

from edl.errors import ModelError, UserCodeError
from edl.trainer.agreement.epochs import CallbackUpdate, Epochs, columns
from edl.trainer.agreement.metric_values import Value, value_of
from edl.trainer.callbacks.rules import is_overridden, name_of
from edl.trainer.callbacks.tensorboard import Scalars
from edl.trainer.callbacks.variables import reachable
from edl.trainer.model import snapshot
from edl.trainer.runtime.error_report import format_error
from edl.trainer.runtime.serialization import NotPlain, decode, encode
from edl.trainer.runtime.watchdog import Watch, unwatched

# Attributes that belong to a process and not to the job: its model and its file.
NOT_KEPT = {"_model", "params", "model"}
# Keras turns the sign of it when it first compares, and remembers that in an attribute which is no value.
SIGNED = (k.EarlyStopping, k.ReduceLROnPlateau, k.ModelCheckpoint)
RAISED = (Exception, SystemExit)


class Learner(Protocol):
    """The part of a learner that callbacks may change."""

    @property
    def model(self) -> Any:
        """The Keras model that callbacks receive."""
        ...

    @property
    def variables(self) -> Sequence[Any]:
        """All variables of the state, in the order of `parts`."""
        ...

    def parts(self) -> list[np.ndarray]:
        """Snapshot the state, uint8 [bytes] for each variable."""
        ...

    def change(self, values: Mapping[int, np.ndarray]) -> None:
        """Set some of the variables, by index in `parts`."""
        ...


class Callbacks:
    """The callbacks of a job, on one worker.

    Args:
        given: those that are to be called, in order.
        steps: in an epoch.
        epochs: to train, as far as that is known now.
        watch: wraps each call.
    """

    def __init__(
        self,
        given: Sequence[k.Callback],
        learner: Learner,
        steps: int,
        epochs: int,
        watch: Watch = unwatched,
    ):
        self._callbacks, self._learner, self._watch = given, learner, watch
        self._made = [_values(callback) for callback in given]  # what they have before the first call
        self._params = {"verbose": 0, "epochs": epochs, "steps": steps}
        self._history = k.History()
        self._started = False  # on_train_begin was called in this process
        self._memory: bytes | None = None  # that they have; None: some other

    def run(self, epochs: Epochs, whole: int, task: int, facts: Mapping[str, float]) -> CallbackUpdate:
        """Call the callbacks that are due after `whole` epochs. The model is unchanged when this returns.

        Args:
            task: epochs to be trained.
            facts: facts about the ring, for TensorBoard.

        Raises:
            UserCodeError: a callback raises.
            ModelError: a callback has changed what cannot be changed while the model is trained.
        """
        model, before = self._learner.model, self._learner.parts()
        made, others = _made(model), reachable(self._callbacks, model, self._learner.variables)
        others_before = snapshot.parts(list(others.values()))
        try:
            self._wake(epochs, before)
            after, stop = epochs, epochs.stop
            model.stop_training, by = False, ""
            if epochs.ended < whole:
                for callback in self._callbacks:
                    if isinstance(callback, Scalars):
                        callback.tell(facts)
                logs, by = self._end_epoch(whole - 1, epochs.history[-1])
                history = (*epochs.history[:-1], logs)
                self._tell_history(history)
                after = replace(after, history=history, ended=whole)
                if by and epochs.raised_at == whole:  # it stops the earlier job, whose epochs were fewer
                    by, after = "", replace(after, refit=True)
                stop = whole if by else stop
            if after.refit:
                model.stop_training = False
                self._call("on_train_begin", "", {})
                after = replace(after, refit=False)
            if whole < task and not by and after.begun <= whole:
                by = self._call("on_epoch_begin", f" of epoch {whole + 1}", whole, {})
                after = replace(after, begun=whole + 1)
                stop = whole + 1 if by else stop  # an epoch that has begun is trained to its end
            if by:
                after = replace(after, stop=stop, stopped_by=by, stop_of=task)
            if _made(model) != made:
                raise ModelError(
                    "a callback has compiled the model anew, or has changed what is trained or a number of "
                    "the optimizer that is not a variable; a ring cannot take that over while it trains"
                )
            _refuse_changed(others, others_before)
            model.reset_metrics()  # as fit() does; a callback may have evaluated the model
            after = replace(after, memory=self._memorized())
            changed = _changed(before, self._learner.parts())
        except BaseException:
            self._memory = None
            raise
        self._learner.change({place: before[place] for place in changed})
        self._memory = after.memory
        return CallbackUpdate(after, changed)

    def end(self, epochs: Epochs) -> bool:
        """Make the calls of `fit`'s end. True if the model has changed, as EarlyStopping may do.

        Raises:
            UserCodeError: a callback raises.
        """
        if not epochs.memory:  # no epoch was trained
            return False
        before = self._learner.parts()
        self._wake(epochs, before)
        self._memory = None  # their memory is not part of the state from here on
        self._tell_history(epochs.history)
        self._call("on_train_end", "", dict(epochs.history[-1]) if epochs.history else {})
        return bool(_changed(before, self._learner.parts()))

    # --- calling

    def _end_epoch(self, epoch: int, told: Mapping[str, Value]) -> tuple[dict[str, Value], str]:
        """Call the hooks of the epoch's end.

        Returns:
            the epoch's entry in the history, with the values that callbacks have added; and the name of the
            callback that has stopped the training, "" if none has.
        """
        logs: dict[str, Any] = {
            n: np.asarray(v) if isinstance(v, list) else v for n, v in sorted(told.items())
        }
        which = f" of epoch {epoch + 1}"
        held_out = {name.removeprefix("val_"): v for name, v in logs.items() if name.startswith("val_")}
        by = self._call("on_test_end", which, held_out) if held_out else ""
        by = self._call("on_epoch_end", which, epoch, logs) or by
        return {name: value_of(v) for name, v in logs.items() if _is_numeric(v)}, by

    def _call(self, hook: str, which: str, *given: Any) -> str:
        """Call a method of all callbacks.

        Returns:
            the name of the callback that has stopped the training; empty if none has.
        """
        by = ""
        for callback in self._callbacks:
            if is_overridden(callback, hook):
                with self._blamed(callback, hook, which):
                    getattr(callback, hook)(*given)
            if self._learner.model.stop_training and not by:
                by = name_of(callback)
        return by

    @contextlib.contextmanager
    def _blamed(self, callback: k.Callback, hook: str, which: str) -> Iterator[None]:
        """Inside this context, errors name the callback.

        Raises:
            UserCodeError: the callback has raised an error.
        """
        call = f"callback {name_of(callback)}: {hook}(){which}"
        try:
            with self._watch(lambda: call):
                yield
        except RAISED as error:
            raise UserCodeError(f"{call} raised {format_error(error)}") from error

    def _tell_history(self, history: Sequence[Mapping[str, Value]]) -> None:
        """Update the history as `fit` does while it runs.

        It is in `model.history`, and in a History among the callbacks.
        """
        own = [callback for callback in self._callbacks if isinstance(callback, k.History)]
        for one in (self._history, *own):
            one.history = columns(history)
            one.epoch = list(range(len(history)))
        self._learner.model.history = own[0] if own else self._history

    # --- what they remember

    def _wake(self, epochs: Epochs, before: list[np.ndarray]) -> None:
        """Restore the callbacks' state of the last update, which may be that of a different process."""
        self._tell_history(epochs.history[: epochs.ended])
        if epochs.memory and self._memory is epochs.memory:
            return
        first = not epochs.memory  # of the job
        model, loggers = self._learner.model, [c for c in self._callbacks if isinstance(c, k.CSVLogger)]
        if not first:
            for logger in loggers:
                _continue(logger, epochs.ended)
        if first or not self._started:
            self._remember(epochs.memory)
            for callback in self._callbacks:
                callback.set_params(self._params)
                callback.set_model(model)
            self._call("on_train_begin", "", {})
            self._started = True
        else:
            for logger in loggers:  # which has written what did not happen
                logger.on_train_begin()
        if not first:  # what on_train_begin() changes is in the state already
            self._learner.change({place: before[place] for place in _changed(before, self._learner.parts())})
            self._remember(epochs.memory)
        self._memory = epochs.memory

    def _memorized(self) -> bytes:
        kept = []
        for callback, made in zip(self._callbacks, self._made, strict=True):
            now = _values(callback)
            kept.append((name_of(callback), {n: v for n, v in now.items() if made.get(n) != v}))
        return encode(kept)

    def _remember(self, memory: bytes) -> None:
        """Restore the callbacks' memory.

        A callback without memory, or of a different type than before, begins anew.
        """
        kept = decode(memory) if memory else []
        for place, (callback, made) in enumerate(zip(self._callbacks, self._made, strict=True)):
            name, values = kept[place] if place < len(kept) else ("", {})
            values = values if name == name_of(callback) else {}
            now = _values(callback)
            for attribute in now.keys() - made.keys() - values.keys():
                delattr(callback, attribute)
            # What is no plain value any more, such as a file, is of this process.
            first = {attribute: value for attribute, value in made.items() if attribute in now}
            for attribute, value in {**first, **values}.items():
                if now.get(attribute) != value:
                    setattr(callback, attribute, decode(value))


def _values(callback: k.Callback) -> dict[str, bytes]:
    """Return a callback's attributes that are plain values, encoded."""
    skipped = set(NOT_KEPT)
    if isinstance(callback, SIGNED):
        skipped.add("min_delta")
    if isinstance(callback, k.CSVLogger):
        skipped |= {"append", "append_header"}  # of the file, as this process has opened it
    if isinstance(callback, k.History):
        skipped |= {"history", "epoch"}
    found = {}
    for name, value in vars(callback).items():
        if name not in skipped:
            with contextlib.suppress(NotPlain):
                found[name] = encode(value)
    return found


def _continue(logger: k.CSVLogger, epochs: int) -> None:
    """Make a CSVLogger continue its file after `epochs` epochs.

    Lines of later epochs are cut off: a worker that was lost has written them.
    """
    logger.append = True
    path = Path(logger.filename)
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file, delimiter=logger.sep))
    except FileNotFoundError:  # it was on another machine
        return
    kept = list(lines)
    while len(kept) > 1 and kept[-1] and kept[-1][0].isdigit() and int(kept[-1][0]) >= epochs:
        kept.pop()
    if kept != lines:
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter=logger.sep).writerows(kept)


def _changed(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """The values whose bytes have changed, by index.

    Raises:
        ModelError: a callback has added or removed variables.
    """
    if len(before) != len(after):
        raise ModelError("a callback has changed which variables the model has")
    pairs = enumerate(zip(before, after, strict=True))
    # An unchanged value has its address: TensorFlow gives a changed variable new memory.
    return {i: b for i, (a, b) in pairs if a.ctypes.data != b.ctypes.data and not np.array_equal(a, b)}


def _refuse_changed(others: Mapping[str, Any], before: list[np.ndarray]) -> None:
    """Refuse changes of variables that are not part of the training state.

    Args:
        others: variables that are not in the training state, by where they were found.
        before: their values before the callbacks were called.

    Raises:
        ModelError: one of them has another value now.
    """
    names = list(others)
    if changed := [names[i] for i in _changed(before, snapshot.parts(list(others.values())))]:
        raise ModelError(
            f"callbacks have changed {', '.join(changed)}, a variable that no training step reads in its "
            "graph, so the other workers would keep its old value. Keep a number in an attribute of the "
            "callback, or let the model or its loss read the variable itself, not in a numpy_function"
        )


def _made(model: Any) -> tuple[Any, ...]:
    """Properties of a model that its step's graph has captured, and that must not change."""
    numbers = (
        {
            name: value
            for name, value in vars(model.optimizer).items()
            if not name.startswith("_") and isinstance(value, bool | int | float | str | None)
        }
        if model.optimizer is not None
        else {}
    )
    trained = tuple(id(v) for v in model.trainable_variables)
    return id(model.optimizer), numbers, trained, id(model._compile_loss)


def _is_numeric(value: Any) -> bool:
    """Whether it is a number, a text that is one, or an array of numbers."""
    try:
        value_of(value)
    except (TypeError, ValueError):
        return False
    return value is not None
