# SPDX-License-Identifier: Apache-2.0
"""The values of `mode`: the task of a job, and where its weights are.

auto               train in mode hybrid if the model has edl.layers.Embedding, else in mode train. The first
                   worker that has built the model decides; from then on the job has that mode
train, allreduce   train with all weights in the ring
hybrid             train with the rows of embeddings on parameter servers and all other weights in the ring
ps                 train with all weights on parameter servers; workers take steps in any order
horovod            run a script that was written for Horovod (`edl horovod`)
evaluate, predict  pass over the records once without changing weights; rows may be on servers here, too
"""

from __future__ import annotations

AUTO = "auto"
TRAIN = "train"
HYBRID = "hybrid"
HOROVOD = "horovod"
MAX_SERVERS = 64  # greatest number of parameter servers of a job
USUAL_SERVERS = 2  # default of modes that need parameter servers
_TRAINING = frozenset({AUTO, TRAIN, "allreduce", HYBRID, "ps"})
_SERVERS = frozenset({HYBRID, "ps"})


def task_of(mode: str) -> str:
    """The task of a job in this mode: train, evaluate, predict or horovod."""
    return TRAIN if mode in _TRAINING else mode


def servers_of(mode: str, asked: int) -> int:
    """The number of parameter servers of a job in this mode, as far as it is decided.

    Args:
        asked: requested number; 0: none. Modes that need servers have `USUAL_SERVERS` then.
    """
    if mode in _SERVERS:
        return asked or USUAL_SERVERS
    return 0 if mode in _TRAINING else asked


def decided(mode: str, tables: int) -> str:
    """The mode of a job once the number of edl.layers.Embedding in its model is known."""
    return mode if mode != AUTO else HYBRID if tables else TRAIN


def became(mode: str, decided: str) -> bool:
    """Whether a job that was started in `mode` can be in the mode `decided`."""
    return mode == decided or (mode == AUTO and decided in (TRAIN, HYBRID))


def is_asynchronous(mode: str) -> bool:
    """Whether the servers hold the whole state and apply steps in any order, without an all-reduce."""
    return mode == "ps"
