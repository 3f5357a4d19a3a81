"""A ring among the members of one process: no engine and no socket, but the same promises.

A `Circle` is what the members of one generation share. Each of them calls the collectives in the same
order; what it contributes and where its result arrives is its `Slot`. Members may be threads, as in
the tests, or whatever else can wait: a `Delivery` says how they wait, and when a result reaches whom.
The simulator's delivers in virtual time, and may give a sum to some members and never to the others.
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
    """One member's part in one collective."""

    rank: int
    call: tuple[Any, ...]  # which collective, the same for all members
    given: np.ndarray | None
    result: np.ndarray | None = None
    error: str = ""
    done: bool = False

    def arrives(self) -> None:
        self.done = True

    def breaks(self, why: str) -> None:
        """Its result does not come, unless it is there already."""
        if not self.done:
            self.done, self.error = True, why


@dataclass(slots=True, eq=False)
class Coming:
    """A state on its way from one member to another."""

    rank: int
    giver: int
    circle: Circle
    prepare: Prepare
    passes_on: bool = False
    given: list[np.ndarray] | None = None

    @property
    def here(self) -> bool:
        return self.given is not None

    def arrives(self, parts: list[np.ndarray]) -> None:
        self.given = parts
        if self.passes_on:
            self.circle.give(self.rank, parts)

    def state(self) -> Any:
        self.circle.delivery.await_state(self)
        assert self.given is not None
        return self.prepare(list(self.given))


class Delivery(Protocol):
    """How members wait, and when their results arrive."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while a circle changes."""
        ...

    def wait(self, slot: Slot) -> None:
        """Return when the slot is done. Called without the lock."""
        ...

    def hand_out(self, circle: Circle, slots: list[Slot]) -> None:
        """All members have contributed: have the results arrive."""
        ...

    def give_up(self, circle: Circle, slots: Sequence[Slot], why: str) -> None:
        """These wait in vain: have them break."""
        ...

    def send(self, circle: Circle, coming: Coming, parts: list[np.ndarray]) -> None:
        """Have the state arrive."""
        ...

    def await_state(self, coming: Coming) -> None:
        """Return when it is here. Called without the lock.

        Raises:
            RingBroken: it does not come.
        """
        ...


class Threads:
    """Members are threads; results arrive at once."""

    def __init__(self) -> None:
        self.lock = threading.Condition()

    def wait(self, slot: Slot) -> None:
        with self.lock:
            self.lock.wait_for(lambda: slot.done)

    def hand_out(self, circle: Circle, slots: list[Slot]) -> None:
        for slot in slots:
            slot.arrives()
        self.lock.notify_all()

    def give_up(self, circle: Circle, slots: Sequence[Slot], why: str) -> None:
        for slot in slots:
            slot.breaks(why)
        self.lock.notify_all()

    def send(self, circle: Circle, coming: Coming, parts: list[np.ndarray]) -> None:
        coming.arrives(parts)
        self.lock.notify_all()

    def await_state(self, coming: Coming) -> None:
        with self.lock:
            self.lock.wait_for(lambda: coming.here or coming.circle.broken)
        if not coming.here:
            raise RingBroken(f"the state did not come: {coming.circle.broken}")


class Circle:
    """The members of one generation. Once broken it stays so.

    Args:
        size: how many members there are.
        delivery: see there; by default the members are threads.
    """

    def __init__(self, size: int, delivery: Delivery | None = None):
        self.size, self.delivery = size, delivery or Threads()
        self.broken = ""  # why; empty while it is whole
        self._left = ""  # likewise, when a member has left in good order: what it took part in still arrives
        self._here: list[Slot] = []  # of the collective that waits for the others
        self._last: dict[int, Slot] = {}  # of each rank, done or not
        self._given: dict[int, list[np.ndarray]] = {}  # states, by rank
        self._coming: list[Coming] = []  # whose givers have not given yet

    def take_part(self, rank: int, call: tuple[Any, ...], given: np.ndarray | None = None) -> Slot:
        """Contribute to the next collective; the result arrives in the slot."""
        slot = Slot(rank, call, given)
        with self.delivery.lock:
            self._last[rank] = slot
            if why := self.broken or self._left:
                self.delivery.give_up(self, [slot], why)
                return slot
            if self._here and self._here[0].call != call:
                other = self._here[0]
                raise ValueError(f"rank {rank} calls {call}, but rank {other.rank} calls {other.call}")
            self._here.append(slot)
            if len(self._here) == self.size:
                slots, self._here = sorted(self._here, key=lambda s: s.rank), []
                result = _result(call, [s.given for s in slots])
                for one in slots:
                    one.result = result
                self.delivery.hand_out(self, slots)
        return slot

    def give(self, rank: int, parts: list[np.ndarray]) -> None:
        with self.delivery.lock:
            self._given[rank] = parts
            for coming in [c for c in self._coming if c.giver == rank]:
                self._coming.remove(coming)
                self.delivery.send(self, coming, parts)

    def take(self, rank: int, giver: int, prepare: Prepare, passes_on: bool) -> Coming:
        coming = Coming(rank, giver, self, prepare, passes_on)
        with self.delivery.lock:
            if giver in self._given:
                self.delivery.send(self, coming, self._given[giver])
            else:
                self._coming.append(coming)
        return coming

    def cut(self, why: str) -> None:
        """Break it: a member has died, or has closed its connections."""
        with self.delivery.lock:
            self.broken = self.broken or why
            self.delivery.give_up(self, [s for s in self._last.values() if not s.done], why)

    def leave(self, rank: int) -> None:
        """One member takes part no longer: there will be no further sum."""
        with self.delivery.lock:
            self._left = self._left or f"rank {rank} has left the ring"
            self.delivery.give_up(self, self._here, self._left)
            self._here = []


class LocalRing:
    """One member's end of a circle.

    `open` before `form` says which circle: as the key-value store of a generation is opened
    for Horovod.
    """

    def __init__(self) -> None:
        self.circle: Circle | None = None
        self._rank = -1
        self.is_cut = False

    def open(self, circle: Circle) -> None:
        """The next ring is formed in this circle."""
        self.circle, self.is_cut = circle, False

    def form(self, rank: int, size: int) -> None:
        assert self.circle is not None and self.circle.size == size, "not a ring of this size"
        self._rank = rank
        if self.is_cut:
            raise RingBroken("the ring was cut before it was formed")
        self._collective("form")

    def reduce(self, vector: Vector) -> Vector:
        return self._collective("reduce", given=np.array(vector, np.float32))

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        result = self._collective("broadcast", root, given=data.copy())
        assert result is not None
        return result

    def room(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def give(self, parts: Sequence[np.ndarray]) -> None:
        assert self.circle is not None, "not in a ring"
        self.circle.give(self._rank, [part.copy() for part in parts])

    def take(self, giver: int, prepare: Prepare, passes_on: bool = False) -> Coming:
        assert self.circle is not None, "not in a ring"
        return self.circle.take(self._rank, giver, prepare, passes_on)

    def cut(self) -> None:
        self.is_cut = True
        if circle := self.circle:
            circle.cut(f"rank {self._rank} has cut the ring")

    def close(self) -> None:
        if self.circle is not None:
            self.circle.leave(self._rank)
        self.circle = None

    def _collective(self, *call: Any, given: np.ndarray | None = None) -> np.ndarray | None:
        assert self.circle is not None, "not in a ring"
        slot = self.circle.take_part(self._rank, call, given)
        self.circle.delivery.wait(slot)
        if slot.error:
            raise RingBroken(f"{call[0]}: {slot.error}")
        return slot.result


def _result(call: tuple[Any, ...], given: list[Any]) -> np.ndarray | None:
    """Of a collective to which all have contributed, by rank. Everybody is given the same one."""
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
