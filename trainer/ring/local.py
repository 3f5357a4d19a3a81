# SPDX-License-Identifier: Apache-2.0
"""A ring among the members of one process: no engine and no socket, but the same promises.

The members of one generation share an `InProcessGroup`. They call the collectives in the same order. A
member's contribution to a collective, and its result, are in its `Slot`. Members may be threads, as in the
tests, or anything that can wait: a `Delivery` defines how members wait, and when which member gets a result.
The simulator's delivery runs in virtual time, and may give a sum to some members and never to the others.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edl.trainer.ring.base import Prepare, RingBroken, Vector


@dataclass(slots=True, eq=False)
class Slot:
    """The part of one member in one collective."""

    rank: int
    call: tuple[Any, ...]  # the collective and its root, the same on all members
    given: np.ndarray | None
    result: np.ndarray | None = None
    error: str = ""
    done: bool = False

    def complete(self) -> None:
        """The result is in the slot; the member need not wait any longer."""
        self.done = True

    def fail(self, why: str) -> None:
        """Let the collective fail for this member, unless its result is there already."""
        if not self.done:
            self.done, self.error = True, why


@dataclass(slots=True, eq=False)
class StateTransfer:
    """A state that one member receives from a different one (a `StateFuture`)."""

    rank: int
    source: int
    group: InProcessGroup
    prepare: Prepare
    forward: bool = False
    parts: list[np.ndarray] | None = None

    @property
    def done(self) -> bool:
        return self.parts is not None

    def complete(self, parts: list[np.ndarray]) -> None:
        """Deliver the state, and forward it if a member receives it from this one."""
        self.parts = parts
        if self.forward:
            self.group.send_state(self.rank, parts)

    def result(self) -> Any:
        self.group.delivery.wait_for_state(self)
        assert self.parts is not None
        return self.prepare(list(self.parts))


class Delivery(Protocol):
    """The delivery of results: how members wait, and when their results arrive."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Return the lock that is held while a group changes."""
        ...

    def wait(self, slot: Slot) -> None:
        """Return when the slot is done. Called without the lock."""
        ...

    def deliver(self, group: InProcessGroup, slots: list[Slot]) -> None:
        """Complete the slots: all members have contributed."""
        ...

    def fail_slots(self, group: InProcessGroup, slots: Sequence[Slot], why: str) -> None:
        """Fail these slots: their results cannot come any more."""
        ...

    def send(self, group: InProcessGroup, transfer: StateTransfer, parts: list[np.ndarray]) -> None:
        """Complete the transfer of the state."""
        ...

    def wait_for_state(self, transfer: StateTransfer) -> None:
        """Return when the state has been received. Called without the lock.

        Raises:
            RingBroken: the state was not received.
        """
        ...


class Threads:
    """Members are threads; results arrive at once."""

    def __init__(self) -> None:
        self.lock = threading.Condition()

    def wait(self, slot: Slot) -> None:
        with self.lock:
            self.lock.wait_for(lambda: slot.done)

    def deliver(self, group: InProcessGroup, slots: list[Slot]) -> None:
        for slot in slots:
            slot.complete()
        self.lock.notify_all()

    def fail_slots(self, group: InProcessGroup, slots: Sequence[Slot], why: str) -> None:
        for slot in slots:
            slot.fail(why)
        self.lock.notify_all()

    def send(self, group: InProcessGroup, transfer: StateTransfer, parts: list[np.ndarray]) -> None:
        transfer.complete(parts)
        self.lock.notify_all()

    def wait_for_state(self, transfer: StateTransfer) -> None:
        with self.lock:
            self.lock.wait_for(lambda: transfer.done or transfer.group.broken)
        if not transfer.done:
            raise RingBroken(f"the state was not received: {transfer.group.broken}")


class InProcessGroup:
    """The members of one generation. Once broken it stays broken.

    Args:
        size: the number of members.
        delivery: how members wait; by default the members are threads.
    """

    def __init__(self, size: int, delivery: Delivery | None = None):
        self.size, self.delivery = size, delivery or Threads()
        self.broken = ""  # why; empty while it works
        self._left = ""  # why no further collective succeeds, though the last results still arrive
        self._waiting: list[Slot] = []  # of the collective that waits for more members
        self._last: dict[int, Slot] = {}  # by rank, done or not
        self._sent: dict[int, list[np.ndarray]] = {}  # sent states, by rank
        self._transfers: list[StateTransfer] = []  # whose source has not sent its state yet

    def contribute(self, rank: int, call: tuple[Any, ...], given: np.ndarray | None = None) -> Slot:
        """Contribute to the next collective; the result arrives in the slot.

        Raises:
            ValueError: the ranks call different collectives: an error of the caller.
        """
        slot = Slot(rank, call, given)
        with self.delivery.lock:
            self._last[rank] = slot
            if why := self.broken or self._left:
                self.delivery.fail_slots(self, [slot], why)
                return slot
            if self._waiting and self._waiting[0].call != call:
                other = self._waiting[0]
                raise ValueError(f"rank {rank} calls {call}, but rank {other.rank} calls {other.call}")
            self._waiting.append(slot)
            if len(self._waiting) == self.size:
                slots, self._waiting = sorted(self._waiting, key=lambda s: s.rank), []
                result = _result(call, [s.given for s in slots])
                for one in slots:
                    one.result = result
                self.delivery.deliver(self, slots)
        return slot

    def send_state(self, rank: int, parts: list[np.ndarray]) -> None:
        """Send the state to the members that wait for this rank's, now and later."""
        with self.delivery.lock:
            self._sent[rank] = parts
            for transfer in [c for c in self._transfers if c.source == rank]:
                self._transfers.remove(transfer)
                self.delivery.send(self, transfer, parts)

    def receive_state(self, rank: int, source: int, prepare: Prepare, forward: bool) -> StateTransfer:
        """Receive the state of rank `source`, once that sends it."""
        transfer = StateTransfer(rank, source, self, prepare, forward)
        with self.delivery.lock:
            if source in self._sent:
                self.delivery.send(self, transfer, self._sent[source])
            else:
                self._transfers.append(transfer)
        return transfer

    def cut(self, why: str) -> None:
        """Break the group: a member has died, or has closed its connections."""
        with self.delivery.lock:
            self.broken = self.broken or why
            self.delivery.fail_slots(self, [s for s in self._last.values() if not s.done], why)

    def leave(self, rank: int) -> None:
        """Leave in good order: no further collective succeeds, but results on their way still arrive."""
        with self.delivery.lock:
            self._left = self._left or f"rank {rank} has left the ring"
            self.delivery.fail_slots(self, self._waiting, self._left)
            self._waiting = []


class LocalRing:
    """One member's end of a group.

    `open` before `form` sets the group, as the key-value store of a generation is opened for Horovod.
    """

    def __init__(self) -> None:
        self.group: InProcessGroup | None = None
        self._rank = -1
        self.is_cut = False

    def open(self, group: InProcessGroup) -> None:
        """The next ring is formed in this group."""
        self.group, self.is_cut = group, False

    def form(self, rank: int, size: int) -> None:
        assert self.group is not None and self.group.size == size, "not a ring of this size"
        self._rank = rank
        if self.is_cut:
            raise RingBroken("the ring was cut before it was formed")
        self._collective("form")

    def reduce(self, vector: Vector) -> Vector:
        return self._collective("reduce", given=np.array(vector))

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        result = self._collective("broadcast", root, given=data.copy())
        assert result is not None
        return result

    def allocate(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def send_state(self, parts: Sequence[np.ndarray]) -> None:
        assert self.group is not None, "not in a ring"
        self.group.send_state(self._rank, [part.copy() for part in parts])

    def receive_state(self, source: int, prepare: Prepare, forward: bool = False) -> StateTransfer:
        assert self.group is not None, "not in a ring"
        return self.group.receive_state(self._rank, source, prepare, forward)

    def cut(self) -> None:
        self.is_cut = True
        if group := self.group:
            group.cut(f"rank {self._rank} has cut the ring")

    def close(self) -> None:
        if self.group is not None:
            self.group.leave(self._rank)
        self.group = None

    def _collective(self, *call: Any, given: np.ndarray | None = None) -> np.ndarray | None:
        assert self.group is not None, "not in a ring"
        slot = self.group.contribute(self._rank, call, given)
        self.group.delivery.wait(slot)
        if slot.error:
            raise RingBroken(f"{call[0]}: {slot.error}")
        return slot.result


def _result(call: tuple[Any, ...], given: list[Any]) -> np.ndarray | None:
    """The result of a collective, from all contributions by rank; every member gets the same array."""
    match call:
        case ("reduce",):
            result = given[0]
            for other in given[1:]:
                result = result + other
        case ("broadcast", root):
            result = given[root]
        case _:
            return None
    result.setflags(write=False)
    return result
