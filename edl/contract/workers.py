# SPDX-License-Identifier: Apache-2.0
"""The environment with which worker processes are started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WORKER_ENVIRONMENT: Final = {
    # All workers hold one model: results that depend on the order of a set or a hash must be equal in all.
    "PYTHONHASHSEED": "0",
    # Keras would take a different backend from the user's ~/.keras/keras.json or environment.
    "KERAS_BACKEND": "tensorflow",
}
"""Variables that must have the same values in all workers."""

ASKED_BACKEND: Final = "EDL_ASKED_KERAS_BACKEND"  # what KERAS_BACKEND was before it was overridden

MALLOC: Final = "GLIBC_TUNABLES"
_MEBIBYTE = 1 << 20
_TUNABLES = {
    # Every step allocates the same tensors anew. By default, glibc returns most of that memory to the kernel
    # after the step. The next step then takes new, zeroed pages, with one page fault per 4 KiB.
    "trim_threshold": 256 * _MEBIBYTE,
    "mmap_threshold": 32 * _MEBIBYTE,  # its maximum; larger blocks are still returned to the kernel
    "hugetlb": 1,  # one page fault per 2 MiB, if transparent_hugepage is madvise or always
    "arena_max": 1,  # else each thread keeps free memory of its own, in growing amounts
}


def worker_environment(given: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to the environment of a worker's process before it starts.

    Args:
        given: existing variables. Settings of `malloc` are added only if no existing variable sets them.
    """
    added, asked = dict(WORKER_ENVIRONMENT), given.get("KERAS_BACKEND")
    if asked not in (None, "", added["KERAS_BACKEND"]):
        added[ASKED_BACKEND] = str(asked)  # a worker reports it
    if not any(name == MALLOC or name.startswith("MALLOC_") for name in given):
        added[MALLOC] = ":".join(f"glibc.malloc.{name}={value}" for name, value in _TUNABLES.items())
    return added
