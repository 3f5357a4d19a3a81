"""How a global batch is divided: the same arithmetic for the master and for the workers."""

from __future__ import annotations


def local_batch(batch: int, rank: int, size: int) -> int:
    """The share of `rank` in a global batch of `batch` records over `size` ranks.

    The shares of all ranks add up to the batch. With more ranks than records the last ranks
    have none: they take part in every step with weight zero, and must not hold a lease.
    """
    return batch // size + (rank < batch % size)
