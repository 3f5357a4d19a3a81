# SPDX-License-Identifier: Apache-2.0
"""The interface of a ring, so that a new engine is one new file.

    form           meet the other members of a generation
    reduce         sum a vector over all members (all-reduce)
    broadcast      receive the root's bytes
    send_state, receive_state   transfer a state between two members while all go on summing
    cut            break the ring from a different thread, at once
    close          leave the ring; the process can form the next one

Any failure inside `form`, `reduce` and `broadcast` raises `RingBroken`. Only the engine runs inside them, so
no error text has to be matched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from edl.errors import EdlError

Vector: TypeAlias = Any  # [n]: a TensorFlow tensor of float32, or a NumPy array, as the learner uses
Prepare: TypeAlias = Callable[[list[np.ndarray]], Any]  # takes a state's parts


class RingBroken(EdlError):
    """A collective did not come back: a member has left or died, or the ring was cut."""


@dataclass(frozen=True)
class RingSlot:
    """A worker's position in a ring."""

    generation: int
    first: int  # the worker of rank 0
    rank: int
    size: int
    speaker: int = 0  # the lowest rank that began with the state; it calls the callbacks for all


class StateFuture(Protocol):
    """A state that is being received."""

    @property
    def done(self) -> bool:
        """Whether the state has been received and prepared, or has failed."""
        ...

    def result(self) -> Any:
        """Wait for the state, and return what `prepare` has made of it. To be called once.

        Raises:
            RingBroken: the state was not received.
            StateDamaged: the state was received, but not as it was sent (trainer/ring/transfer.py).
            Exception: raised by `prepare`.
        """
        ...


class Ring(Protocol):
    """One member's end of a ring."""

    def form(self, rank: int, size: int) -> None:
        """Meet the other members.

        Raises:
            RingBroken: a member died meanwhile, or the master called the generation off.
        """
        ...

    def reduce(self, vector: Vector) -> Vector:
        """Return the sum of `vector` over all ranks, the same on each rank to the bit.

        An array may hold the sum afterwards, or anything if the ring breaks. Called from any thread, one
        call at a time.

        Raises:
            RingBroken: the sum did not come back here; other ranks may have it.
        """
        ...

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        """Return the root's `data`, uint8 or int64 [n]; n is the same on all ranks.

        Raises:
            RingBroken: the data did not come back here; other ranks may have them.
        """
        ...

    def send_state(self, parts: Sequence[np.ndarray]) -> None:
        """Send a state to the one member that calls `receive_state` for it. Returns at once.

        Args:
            parts: uint8 [bytes] each; they must not change until the ring is closed.
        """
        ...

    def receive_state(self, source: int, prepare: Prepare, forward: bool = False) -> StateFuture:
        """Receive the state that rank `source` sends or forwards. Returns at once.

        Args:
            prepare: called with the parts, on the thread that has received them; its result is the future's.
            forward: whether one more member receives the state from this one.
        """
        ...

    def allocate(self, nbytes: int) -> np.ndarray:
        """Memory for a part of a received state, uint8 [nbytes]."""
        ...

    def cut(self) -> None:
        """Close the ring's connections, from any thread: every member's collective fails now."""
        ...

    def close(self) -> None:
        """Leave the ring, broken or not."""
        ...


TOGETHER = 16 << 20


def broadcast_parts(
    ring: Ring, parts: Sequence[np.ndarray], root: int, rank: int, together: int = TOGETHER
) -> list[np.ndarray]:
    """Return the root's parts, uint8 [bytes] each; all ranks know the sizes.

    A few megabytes travel at a time, so that the root needs no additional memory and the other ranks only
    that of one copy.

    Args:
        together: bytes that travel at once, of several small parts or of a large one.

    Raises:
        RingBroken: see `Ring.broadcast`.
    """
    found: list[np.ndarray] = []
    for several in _pieces(parts, together):
        if len(several) == 1:
            found.append(_broadcast_part(ring, several[0], root, rank, together))
            continue
        piece = ring.broadcast(np.concatenate(several), root)
        lengths = [len(part) for part in several]
        found += several if rank == root else np.split(piece, np.cumsum(lengths)[:-1])
    return found


def _broadcast_part(ring: Ring, part: np.ndarray, root: int, rank: int, together: int) -> np.ndarray:
    whole = part if rank == root else ring.allocate(len(part))
    for start in range(0, len(part), together):
        some = slice(start, start + together)
        piece = ring.broadcast(part[some], root)
        if rank != root:
            whole[some] = piece
    return whole


TEXT = 256  # bytes, UTF-8


def broadcast_text(ring: Ring, text: str, root: int) -> str:
    """Return the root's text, cut off where it is too long.

    Raises:
        RingBroken: see `Ring.broadcast`.
    """
    data = np.zeros(TEXT, np.uint8)
    encoded = np.frombuffer(text.encode()[:TEXT], np.uint8)
    data[: len(encoded)] = encoded
    return ring.broadcast(data, root).tobytes().rstrip(b"\0").decode(errors="ignore")


def broadcast_bytes(ring: Ring, data: bytes, root: int) -> bytes:
    """Return the root's bytes; the other ranks need not know how many there are.

    Raises:
        RingBroken: see `Ring.broadcast`.
    """
    length = int(ring.broadcast(np.array([len(data)], np.int64), root)[0])
    given = np.frombuffer(data, np.uint8) if len(data) == length else np.zeros(length, np.uint8)
    return ring.broadcast(given, root).tobytes()


def _pieces(parts: Sequence[np.ndarray], most: int) -> Iterator[list[np.ndarray]]:
    several: list[np.ndarray] = []
    nbytes = 0
    for part in parts:
        if several and nbytes + len(part) > most:
            yield several
            several, nbytes = [], 0
        several.append(part)
        nbytes += len(part)
    if several:
        yield several
