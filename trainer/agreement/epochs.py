"""What the epochs have given so far: a part of the state, like the step that it belongs to.

    history    of each whole epoch what Keras' `fit` would have in its history
    loss       of the epoch in progress, over all of its records, whoever trained on them
    callbacks  how far they have been called, what they remember, and whether one has stopped the training

All ranks make the same of the same sums. What a callback changes is made by one of them, and taken over by
all at once: a `Turn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np

from edl.checkpoints import Manifest, Variable
from edl.trainer.agreement.metric_values import Value, mapped
from edl.trainer.runtime.serialization import LENGTH, decode, encode

MEMORY = "callbacks"  # what they remember, among the tensors of a checkpoint


def without_memory(manifest: Manifest) -> list[Variable]:
    """A checkpoint's variables that are the learner's."""
    return [v for v in manifest.variables if v.name != MEMORY]


History: TypeAlias = tuple[Mapping[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Epochs:
    """A value; each method gives the next one.

    Args:
        history: of each whole epoch, from the first.
        loss, records: of the steps of the epoch in progress: the sum of their records' losses, and how many.
        ended: epochs whose end the callbacks have been told of.
        begun: epochs whose beginning they have been told of.
        stop: with so many epochs the training ends, because a callback wants it; 0: none does.
        stopped_by: its name.
        stop_of: how many were to be trained then.
        memory: what the callbacks remember; empty: they have not been called yet.
    """

    history: History = ()
    loss: float = 0.0
    records: int = 0
    ended: int = 0
    begun: int = 0
    stop: int = 0
    stopped_by: str = ""
    stop_of: int = 0
    memory: bytes = b""

    def after(self, loss: float, records: int) -> Epochs:
        """With a step of so many records and this mean loss."""
        return replace(self, loss=self.loss + loss * records, records=self.records + records)

    def whole(self, metrics: Mapping[str, Value], has_loss: bool = True) -> Epochs:
        """With the end of the epoch in progress, whose compiled metrics these are.

        Args:
            has_loss: whether Keras' `fit` has the loss in the history, if it is not among the metrics.
        """
        loss = {"loss": self.loss / self.records} if self.records and has_loss else {}
        return replace(self, history=(*self.history, {**loss, **metrics}), loss=0.0, records=0)

    def evaluated(self, metrics: Mapping[str, Value]) -> Epochs:
        """With what the last whole epoch's model makes of the records that were held out."""
        found = {f"val_{name}": value for name, value in metrics.items()}
        return replace(self, history=(*self.history[:-1], {**self.history[-1], **found}))

    @property
    def last_loss(self) -> float | None:
        """The loss of the last whole epoch; None if it has none."""
        loss = self.history[-1].get("loss")
        return None if isinstance(loss, list) else loss

    def due(self, whole: int, more: bool) -> bool:
        """Whether callbacks are to be called at an epoch's boundary.

        Args:
            whole: so many epochs are.
            more: whether another one is to be trained.
        """
        return self.ended < whole or (more and self.begun <= whole)

    def limit(self, epochs: int) -> int:
        """How many are to be trained where the task is so many."""
        return min(epochs, self.stop) if self.stop else epochs

    def going_on(self, epochs: int) -> Epochs:
        """For a job that goes on from here, to train so many: more than then is people's word."""
        return replace(self, stop=0, stopped_by="", stop_of=0) if epochs > self.stop_of else self

    def described(self) -> dict[str, Any]:
        """As JSON, without `memory`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "memory"}

    @staticmethod
    def of(described: Mapping[str, Any], memory: bytes) -> Epochs:
        """What `described` describes; of what is not finite, JSON may have made a text."""
        history = tuple({n: mapped(v, float) for n, v in entry.items()} for entry in described["history"])
        loss = float(described["loss"])
        return Epochs(**{**described, "history": history, "loss": loss}, memory=memory)

    def pieces(self) -> list[bytes]:
        """All of it. What is long, and the same for a whole epoch, is a piece that was made before."""
        told = {name: value for name, value in self.described().items() if name != "history"}
        history = _packed(self.history)
        own = encode([told, len(history)])
        return [len(own).to_bytes(LENGTH, "little"), own, history, self.memory]

    def pack(self) -> bytes:
        return b"".join(self.pieces())

    @staticmethod
    def unpack(data: bytes | memoryview) -> Epochs:
        """What `pack` has packed."""
        view = memoryview(data)
        begin = LENGTH + int.from_bytes(view[:LENGTH], "little")
        told, length = decode(view[LENGTH:begin])
        end = begin + length
        return Epochs(**told, history=decode(view[begin:end]), memory=bytes(view[end:]))

    @staticmethod
    def unknown(whole: int) -> Epochs:
        """Of a state that says nothing of its epochs, but how many there were."""
        return Epochs(history=({},) * whole, ended=whole)


_last: tuple[History, bytes] = (), encode(())


def _packed(history: History) -> bytes:
    """The last one is kept: it is the same until an epoch ends. From any thread."""
    global _last
    last = _last
    if last[0] is not history:
        _last = last = history, encode(history)
    return last[1]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What the callbacks have made at an epoch's boundary, for all ranks to take over."""

    after: Epochs
    changed: Mapping[int, np.ndarray]  # variables, by their place in the learner's `parts`: uint8 [bytes]

    @property
    def nbytes(self) -> int:
        """That it takes to keep it."""
        return len(self.after.memory) + sum(value.nbytes for value in self.changed.values())

    def pack(self) -> np.ndarray:
        """As uint8 [bytes]."""
        data = encode({"after": self.after.pack(), "changed": dict(self.changed)})
        return np.frombuffer(data, np.uint8)

    @staticmethod
    def unpack(data: np.ndarray) -> Turn:
        found: dict[str, Any] = decode(data.data)
        return Turn(Epochs.unpack(found["after"]), found["changed"])


def columns(history: Sequence[Mapping[str, Value]]) -> dict[str, list[Value | None]]:
    """As `fit` returns it: by name, a value for each epoch; None where an epoch has none of that name."""
    names = dict.fromkeys(name for entry in history for name in entry)
    return {name: [entry.get(name) for entry in history] for name in names}
