# SPDX-License-Identifier: Apache-2.0
"""The history of the epochs so far: a part of the state, like the step that it belongs to.

    history    for each whole epoch, what Keras' `fit` would have in its history
    loss       of the epoch in progress, over all of its records on all ranks
    callbacks  which calls were made, what they remember, and whether one has stopped the training

All ranks compute the same history from the same sums. Callbacks run on one rank only; all ranks apply their
changes together, as a `CallbackUpdate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np

from edl.checkpoints import Manifest, Variable
from edl.trainer.agreement.metric_values import Value, mapped
from edl.trainer.runtime.serialization import LENGTH, decode, encode

MEMORY = "callbacks"  # the name of their memory among the tensors of a checkpoint


def without_memory(manifest: Manifest) -> list[Variable]:
    """The learner's variables in a checkpoint: all but the memory of callbacks."""
    return [v for v in manifest.variables if v.name != MEMORY]


History: TypeAlias = tuple[Mapping[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Epochs:
    """An immutable value; each method returns the next one.

    Args:
        history: the values of each whole epoch, from the first.
        loss, records: of the steps of the epoch in progress: the sum of their records' losses, and the number
            of records.
        ended: number of epochs for whose end the callbacks were called.
        begun: number of epochs for whose beginning they were called.
        stop: number of epochs after which a callback ends the training; 0 if none does.
        stopped_by: the name of that callback.
        stop_of: the number of epochs that were to be trained when it did.
        raised_at: the number of whole epochs at which a job with more epochs has resumed; 0 if none has.
        refit: whether `on_train_begin` is due again, because a stop was dropped, as for a further `fit`.
        memory: what the callbacks remember; empty if they were never called.
    """

    history: History = ()
    loss: float = 0.0
    records: int = 0
    ended: int = 0
    begun: int = 0
    stop: int = 0
    stopped_by: str = ""
    stop_of: int = 0
    raised_at: int = 0
    refit: bool = False
    memory: bytes = b""

    def after(self, loss: float, records: int) -> Epochs:
        """Add a step with this many records and this mean loss."""
        return replace(self, loss=self.loss + loss * records, records=self.records + records)

    def whole(self, metrics: Mapping[str, Value], has_loss: bool = True) -> Epochs:
        """End the epoch in progress, with its compiled metrics.

        Args:
            has_loss: whether Keras' `fit` has the loss in the history, if it is not among the metrics.
        """
        loss = {"loss": self.loss / self.records} if self.records and has_loss else {}
        return replace(self, history=(*self.history, {**loss, **metrics}), loss=0.0, records=0)

    def evaluated(self, metrics: Mapping[str, Value]) -> Epochs:
        """Add the metrics of the held-out records to the last whole epoch."""
        found = {f"val_{name}": value for name, value in metrics.items()}
        return replace(self, history=(*self.history[:-1], {**self.history[-1], **found}))

    @property
    def last_loss(self) -> float | None:
        """The loss of the last whole epoch; None if it has none."""
        loss = self.history[-1].get("loss")
        return None if isinstance(loss, list) else loss

    def due(self, whole: int, more: bool) -> bool:
        """Whether callbacks must be called at an epoch's boundary.

        Args:
            whole: the number of whole epochs.
            more: whether a further epoch will be trained.
        """
        return self.ended < whole or (more and self.begun <= whole)

    def limit(self, epochs: int) -> int:
        """Return the number of epochs to train: `epochs`, or fewer if callbacks have stopped the training."""
        return min(epochs, self.stop) if self.stop else epochs

    def going_on(self, epochs: int, before: int) -> Epochs:
        """Continue from here in a job that trains `epochs`.

        If these are more than before, the user wants more: a stop is dropped. The state may also be older
        than the last `on_epoch_end`, which then stops the earlier job only (`raised_at`).

        Args:
            before: the epochs that the job trained which has written this state.
        """
        if epochs <= (self.stop_of or before):
            return self
        refit = self.refit or bool(self.stop)
        return replace(self, stop=0, stopped_by="", stop_of=0, raised_at=len(self.history), refit=refit)

    def to_json(self) -> dict[str, Any]:
        """The fields for JSON, without `memory`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "memory"}

    @staticmethod
    def from_json(saved: Mapping[str, Any], memory: bytes) -> Epochs:
        """The reverse of `to_json`; JSON may have made texts of numbers that are not finite."""
        history = tuple({n: mapped(v, float) for n, v in entry.items()} for entry in saved["history"])
        loss = float(saved["loss"])
        return Epochs(**{**saved, "history": history, "loss": loss}, memory=memory)

    def pieces(self) -> list[bytes]:
        """Return the packed bytes.

        The history is long and constant within an epoch, so it is packed once an epoch.
        """
        told = {name: value for name, value in self.to_json().items() if name != "history"}
        history = _packed(self.history)
        own = encode([told, len(history)])
        return [len(own).to_bytes(LENGTH, "little"), own, history, self.memory]

    def pack(self) -> bytes:
        """Serialize for another member; `unpack` reads it."""
        return b"".join(self.pieces())

    @staticmethod
    def unpack(data: bytes | memoryview) -> Epochs:
        """The reverse of `pack`."""
        view = memoryview(data)
        begin = LENGTH + int.from_bytes(view[:LENGTH], "little")
        told, length = decode(view[LENGTH:begin])
        end = begin + length
        return Epochs(**told, history=decode(view[begin:end]), memory=bytes(view[end:]))

    @staticmethod
    def unknown(whole: int) -> Epochs:
        """The history of a state that records only the number of its epochs."""
        return Epochs(history=({},) * whole, ended=whole)


_last: tuple[History, bytes] = (), encode(())


def _packed(history: History) -> bytes:
    """The packed history. The last one is cached: it is the same until an epoch ends. From any thread."""
    global _last
    last = _last
    if last[0] is not history:
        _last = last = history, encode(history)
    return last[1]


@dataclass(frozen=True, slots=True, eq=False)
class CallbackUpdate:
    """The changes that the callbacks made at an epoch's boundary, for all ranks to apply."""

    after: Epochs
    changed: Mapping[int, np.ndarray]  # variables by their index in the learner's `parts`, uint8 [bytes]
    agreed = None  # it is broadcast: no vote comes with it

    @property
    def nbytes(self) -> int:
        """The memory that it takes while it is pending."""
        return len(self.after.memory) + sum(value.nbytes for value in self.changed.values())

    def pack(self) -> np.ndarray:
        """Encode the update as uint8 [bytes]."""
        data = encode({"after": self.after.pack(), "changed": dict(self.changed)})
        return np.frombuffer(data, np.uint8)

    @staticmethod
    def unpack(data: np.ndarray) -> CallbackUpdate:
        """Read an update that a member has broadcast, uint8 [bytes]."""
        found: dict[str, Any] = decode(data.data)
        return CallbackUpdate(Epochs.unpack(found["after"]), found["changed"])


def columns(history: Sequence[Mapping[str, Value]]) -> dict[str, list[Value | None]]:
    """Return the history as `fit` returns it: by name, a value for each epoch.

    The value is None where an epoch has none of this name.
    """
    names = dict.fromkeys(name for entry in history for name in entry)
    return {name: [entry.get(name) for entry in history] for name in names}
