"""The ring as the trainer sees it: seven verbs, so that another engine is another file.

    form       meet the other members of a generation
    reduce     sum a vector over all members
    broadcast  take the root's bytes
    give, take  one member's state goes to another while both go on summing
    cut        break it from another thread, at once
    close      leave; the process can form again

Whatever goes wrong inside `form`, `reduce` and `broadcast` is `RingBroken`: nothing but the
engine runs in there, so no text of an error has to be matched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from edl.errors import EdlError

Vector: TypeAlias = Any  # float32 [n], in the learner's library: a TensorFlow tensor or a NumPy array
Prepare: TypeAlias = Callable[[list[np.ndarray]], Any]  # of a state's parts


class RingBroken(EdlError):
    """A collective did not come back: a member has left or died, or the ring was cut."""


class Arrival(Protocol):
    """A state that is on its way."""

    @property
    def here(self) -> bool:
        """Whether all of it has come and is prepared, or it is known that it does not."""
        ...

    def state(self) -> Any:
        """What `prepare` has made of it, once; waits for it.

        Raises:
            RingBroken: it does not come.
            StateDamaged: it came, but not as it was given (trainer/ring/transfer.py).
            Exception: of `prepare`.
        """
        ...


class Ring(Protocol):
    """One member's end of a ring."""

    def form(self, rank: int, size: int) -> None:
        """Meet the others.

        Raises:
            RingBroken: a member died on the way, or the generation was called off.
        """
        ...

    def reduce(self, vector: Vector) -> Vector:
        """The sum over all ranks of `vector`, the same on each rank to the bit.

        Called from any thread, one call at a time.

        Raises:
            RingBroken: it did not come back here; it may have elsewhere.
        """
        ...

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        """The root's `data`, uint8 or int64 [n]; n is the same on all ranks.

        Raises:
            RingBroken: it did not come back here; it may have elsewhere.
        """
        ...

    def give(self, parts: Sequence[np.ndarray]) -> None:
        """Give a state to the one member that asks for it with `take`. Returns at once.

        Args:
            parts: uint8 [bytes] each; they must not change until the ring is closed.
        """
        ...

    def take(self, giver: int, prepare: Prepare, passes_on: bool = False) -> Arrival:
        """Have the state come that this rank gives, or passes on. Returns at once.

        Args:
            passes_on: one more member takes it, from this one.
            prepare: makes of the parts what is wanted of them, on the thread that has received them.
        """
        ...

    def room(self, nbytes: int) -> np.ndarray:
        """Memory for a part of a state that is to come, uint8 [nbytes]."""
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
    """The root's parts, uint8 [bytes] each; how long each is, all ranks know: theirs are as long.

    A little at a time, so that the root needs no more memory than it has, and the others that of one copy.

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
    whole = part if rank == root else ring.room(len(part))
    for start in range(0, len(part), together):
        some = slice(start, start + together)
        piece = ring.broadcast(part[some], root)
        if rank != root:
            whole[some] = piece
    return whole


TEXT = 256  # bytes


def broadcast_text(ring: Ring, text: str, root: int) -> str:
    """A sentence of the root's, cut off where it is too long.

    Raises:
        RingBroken: see `Ring.broadcast`.
    """
    data = np.zeros(TEXT, np.uint8)
    encoded = np.frombuffer(text.encode()[:TEXT], np.uint8)
    data[: len(encoded)] = encoded
    return ring.broadcast(data, root).tobytes().rstrip(b"\0").decode(errors="ignore")


def broadcast_bytes(ring: Ring, data: bytes, root: int) -> bytes:
    """The root's bytes; the others need not know how many they are.

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
