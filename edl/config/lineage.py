"""What a checkpoint and the job that goes on from it must have in common.

Which records are in a state is arithmetic over a few values (edl/contract/steps.py, order.py), so these are
kept in each checkpoint. With others, its number of steps would mean other records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from edl.config.job import Config
from edl.errors import ConfigError

ORDER = frozenset({"training.seed", "data.shuffle"})  # of the records
FORCEABLE = ORDER | {
    "model.module",
    "model.source",
    "ps.replaceEmbeddings",
}  # what the model is, its fingerprint says


def kept(config: Config) -> dict[str, Any]:
    """The values that a checkpoint keeps, by their keys."""
    source = config.model.source
    return {
        "model.module": "" if source else config.model.module,
        "model.source": f"SHA-256 {hashlib.sha256(source.encode()).hexdigest()}" if source else "",
        "training.batchSize": config.training.batch_size,
        "training.seed": config.training.seed,
        "data.shuffle": config.data.shuffle,
        **({"ps.replaceEmbeddings": least} if (least := config.replaces_embeddings) else {}),
    }


def check(
    where: str,
    step: int,
    run: str,
    values: Mapping[str, Any],
    config: Config,
    run_id: str,
    within: int | None = None,
) -> tuple[str, ...]:
    """Whether the job may go on from a checkpoint.

    Args:
        where: the checkpoints' directory or address.
        run: which has written it, and
        values: what it has kept.
        run_id: of the job; empty: it has not begun.
        within: the epoch, from 1, in the middle of which it is; None: it is at the end of one.

    Returns:
        What differs and was forced (`checkpoint.force`), in words.

    Raises:
        ConfigError: it is another run's and the job does not resume, or a value differs.
    """
    if run != run_id and not config.checkpoint.resume:
        raise ConfigError(
            f"checkpoint.dir: {where} holds checkpoints of another run ({run}, step {step:,}): choose "
            "another directory, or go on from them with checkpoint.resume=true (`edl run --resume DIR`)"
        )
    ours = kept(config)
    changed = [key for key in ours if key in values and values[key] != ours[key]]
    if refused := [key for key in changed if not (config.checkpoint.force and key in FORCEABLE)]:
        raise ConfigError(
            "\n".join(
                f"{key} is {ours[key]!r}, and the checkpoint of step {step:,} in {where} was made with "
                f"{values[key]!r}: {_why(key)}"
                for key in refused
            )
        )
    return tuple(
        f"{key} {values[key]!r} -> {ours[key]!r} at step {step:,}"
        + (
            f", in epoch {within}, of which records may count twice or not at all"
            * (key in ORDER and bool(within))
        )
        for key in changed
    )


def _why(key: str) -> str:
    if key in FORCEABLE:
        return (
            "it cannot change, for the step would mean other records or another model (--force, or "
            "checkpoint.force=true, goes on all the same)"
        )
    return (
        "it cannot change, not even by force, for so many steps would mean other records; to begin another "
        "training with that state: initFrom.path"
    )
