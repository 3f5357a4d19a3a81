"""The environment that the process of every worker is started with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WORKER_ENVIRONMENT: Final = {
    # All workers hold one model: what follows from the order of a set or a hash must be equal in all of them.
    "PYTHONHASHSEED": "0",
    # Keras would take another backend from the user's ~/.keras/keras.json or environment.
    "KERAS_BACKEND": "tensorflow",
}
"""What must be the same in all of them."""

ASKED_BACKEND: Final = "EDL_ASKED_KERAS_BACKEND"  # what KERAS_BACKEND was before it was overridden
# Without it, TensorFlow reserves all of a GPU's memory at once, and a second worker on that GPU finds none.
MEMORY_GROWTH: Final = "TF_FORCE_GPU_ALLOW_GROWTH"

MALLOC: Final = "GLIBC_TUNABLES"
_MEBIBYTE = 1 << 20
_TUNABLES = {
    # Every step allocates the same tensors anew. By itself glibc gives most of them back to the kernel after
    # the step, and takes pages in which everything is zero, one fault each 4 KiB, for the next.
    "trim_threshold": 256 * _MEBIBYTE,
    "mmap_threshold": 32 * _MEBIBYTE,  # its most; what is larger is still given back
    "hugetlb": 1,  # where the kernel may (transparent_hugepage is madvise or always), one fault each 2 MiB
    "arena_max": 1,  # else each thread keeps its own free memory, and more and more of it
}


def worker_environment(given: Mapping[str, str]) -> dict[str, str]:
    """What is added to the environment of a worker's process before that begins.

    Args:
        given: its variables. How `malloc` works and how TensorFlow reserves a GPU's memory is added only if
            no variable says that.
    """
    added, asked = dict(WORKER_ENVIRONMENT), given.get("KERAS_BACKEND")
    if asked not in (None, "", added["KERAS_BACKEND"]):
        added[ASKED_BACKEND] = str(asked)  # which a worker reports
    if MEMORY_GROWTH not in given:
        added[MEMORY_GROWTH] = "true"
    if not any(name == MALLOC or name.startswith("MALLOC_") for name in given):
        added[MALLOC] = ":".join(f"glibc.malloc.{name}={value}" for name, value in _TUNABLES.items())
    return added
