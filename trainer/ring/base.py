"""The ring as the trainer sees it: five verbs, so that another engine is another file.

    form       meet the other members of a generation
    reduce     sum a vector over all members
    broadcast  take the root's bytes
    cut        break it from another thread, at once
    close      leave; the process can form again

Whatever goes wrong inside `form`, `reduce` and `broadcast` is `RingBroken`: nothing but the
engine runs in there, so no text of an error has to be matched.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np

from edl.errors import EdlError

Vector: TypeAlias = Any  # float32 [n], in the learner's library: a TensorFlow tensor or a NumPy array


class RingBroken(EdlError):
    """A collective did not come back: a member has left or died, or the ring was cut."""


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

    def cut(self) -> None:
        """Close the ring's connections, from any thread: every member's collective fails now."""
        ...

    def close(self) -> None:
        """Leave the ring, broken or not."""
        ...
