"""What a job does, and what it does that with: the words of the value `mode`.

auto               it trains: as hybrid if its model has edl.layers.Embedding, else as train. The first worker
                   that has built the model finds out; from then on the job has that mode
train, allreduce   it trains, and all weights are in the ring
hybrid             it trains: the rows of embeddings are on parameter servers, all other weights in the ring
ps                 it trains: all weights are on parameter servers, and workers take steps in any order
evaluate, predict  it goes over the records once, and changes no weight; rows may be on servers here, too
"""

from __future__ import annotations

AUTO = "auto"
TRAIN = "train"
HYBRID = "hybrid"
MOST_SERVERS = 64  # parameter servers of a job
USUAL_SERVERS = 2  # of one that needs some and does not say how many
_TRAINING = frozenset({AUTO, TRAIN, "allreduce", HYBRID, "ps"})
_SERVERS = frozenset({HYBRID, "ps"})


def task_of(mode: str) -> str:
    """train, evaluate or predict."""
    return TRAIN if mode in _TRAINING else mode


def servers_of(mode: str, asked: int) -> int:
    """How many parameter servers a job of that mode has, as far as that is decided.

    Args:
        asked: for so many; 0: for none, but a mode that needs some has them all the same.
    """
    if mode in _SERVERS:
        return asked or USUAL_SERVERS
    return 0 if mode in _TRAINING else asked


def decided(mode: str, tables: int) -> str:
    """What becomes of the mode of a job whose model has so many edl.layers.Embedding."""
    return mode if mode != AUTO else HYBRID if tables else TRAIN


def became(mode: str, decided: str) -> bool:
    """Whether a job of that mode can have become one of the other."""
    return mode == decided or (mode == AUTO and decided in (TRAIN, HYBRID))


def is_asynchronous(mode: str) -> bool:
    """Whether its servers have the whole state, and take steps in any order: no ring's sum makes one."""
    return mode == "ps"
