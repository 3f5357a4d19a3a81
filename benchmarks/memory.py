# SPDX-License-Identifier: Apache-2.0
"""Memory that a measurement is not to pay for: a virtual machine's host may have to find it first."""

from __future__ import annotations

import mmap


class AtHand:
    """Memory that this machine has. A virtual one may have lent to its host what is free, and to get 1 GB of
    it again takes 2 s of a core. So it is held until it is needed.
    """

    def __init__(self, size: int):
        self._held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._held.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            self._held[at] = 1

    def give(self) -> None:
        self._held.close()
