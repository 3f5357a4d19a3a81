# SPDX-License-Identifier: Apache-2.0
"""The environment of worker processes: what is added to it, and what other launchers have left in it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Final

from edl.contract import script_imports

WORKER_ENVIRONMENT: Final = {
    # All workers hold one model: results that depend on the order of a set or a hash must be equal in all.
    "PYTHONHASHSEED": "0",
    # Keras would take a different backend from the user's ~/.keras/keras.json or environment.
    "KERAS_BACKEND": "tensorflow",
}
"""Variables that must have the same values in all workers."""

ASKED_BACKEND: Final = "EDL_ASKED_KERAS_BACKEND"  # KERAS_BACKEND before it was overridden; empty: none

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


# Threads of BLAS, OpenMP (and so of PyTorch) and TensorFlow. Their libraries read these as they are loaded.
_THREADS = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"),
    "VECLIB_MAXIMUM_THREADS",
)
_TENSORFLOW_BETWEEN = "TF_NUM_INTEROP_THREADS"


def script_environment(given: Mapping[str, str], script: str, threads: int = 0) -> dict[str, str]:
    """The variables to add to the environment of the processes that run a user's own training loop.

    Args:
        given: existing variables, which are not overridden.
        script: the path or the text of the script.
        threads: of each library in a worker; 0 leaves the number to the libraries.
    """
    added = {script_imports.VARIABLE: ",".join(script_imports.leading_imports(script))}
    if threads:
        added |= {name: str(threads) for name in _THREADS} | {_TENSORFLOW_BETWEEN: "1"}
    return {name: value for name, value in added.items() if name not in given}


def respect_backend(environment: MutableMapping[str, str]) -> None:
    """Undo the change of KERAS_BACKEND: a script chooses its backend itself, as Keras' own file may."""
    asked = environment.pop(ASKED_BACKEND, "")
    if asked:
        environment["KERAS_BACKEND"] = asked
    else:
        environment.pop("KERAS_BACKEND", None)


# A launcher that edl was started by, or a shell of an earlier job, tells a process its place by these. A ring
# has its own places, and Horovod, TensorFlow or the model's code would take a stale one for the truth.
_LAUNCHERS = frozenset(
    {
        "TF_CONFIG",
        *(
            f"HOROVOD_{name}"
            for name in ("RANK", "SIZE", "CONTROLLER", "CPU_OPERATIONS", "ELASTIC", "HOSTNAME")
        ),
        *(f"HOROVOD_{of}_{name}" for of in ("LOCAL", "CROSS") for name in ("RANK", "SIZE")),
        *(f"HOROVOD_GLOO_{name}" for name in ("IFACE", "RENDEZVOUS_ADDR", "RENDEZVOUS_PORT")),
        *("HOROVOD_SECRET_KEY", "HOROVOD_HOSTS", "HOROVOD_NUM_NICS"),
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
_LAUNCHER_PREFIXES = ("OMPI_COMM_WORLD_", "OMPI_MCA_orte_ess_", "PMI_", "PMIX_", "TORCHELASTIC_")
# Horovod's engine crashes (SIGSEGV) if both are set: its tuner then has nothing to tune, also if it is off.
_FUSION, _CYCLE = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"


def remove_leftovers(environment: MutableMapping[str, str]) -> list[str]:
    """Remove what other launchers have left in the environment of a process that runs a model.

    Settings of Horovod's engine stay, except for a combination that crashes it.

    Returns:
        Lines about what was removed, for warnings.
    """
    found = sorted(n for n in environment if n in _LAUNCHERS or n.startswith(_LAUNCHER_PREFIXES))
    for name in found:
        del environment[name]
    lines = []
    if found:
        listed = ", ".join(found)
        lines.append(f"the environment has variables of another launcher, which are not used: {listed}")
    if _FUSION in environment and environment.pop(_CYCLE, None) is not None:
        lines.append(
            f"{_CYCLE} is not used: Horovod crashes if it and {_FUSION} are both set, and begins a "
            "cycle as soon as a tensor is ready anyway"
        )
    return lines


def worker_environment(given: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to the environment of a worker's process before it starts.

    Args:
        given: existing variables. Settings of `malloc` are added only if no existing variable sets them.
    """
    added = dict(WORKER_ENVIRONMENT)
    added[ASKED_BACKEND] = given.get(ASKED_BACKEND, given.get("KERAS_BACKEND", ""))
    if not any(name == MALLOC or name.startswith("MALLOC_") for name in given):
        added[MALLOC] = ":".join(f"glibc.malloc.{name}={value}" for name, value in _TUNABLES.items())
    return added
