# SPDX-License-Identifier: Apache-2.0
"""Compatibility of a checkpoint with the job that resumes from it.

The records that are in a state are computed from a few values (edl/contract/steps.py, order.py), so each
checkpoint contains these. With different values, its number of steps would mean different records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from edl.config.job import Config
from edl.errors import ConfigError

ORDER = frozenset({"training.seed", "data.shuffle"})  # keys that determine the order of the records
# The fingerprint identifies the model.
FORCEABLE = ORDER | {
    "model.module",
    "model.source",
    "model.script",
    "ps.replaceEmbeddings",
}


def kept(config: Config) -> dict[str, Any]:
    """The values that are stored in a checkpoint, by key."""
    source, script = config.model.source, config.model.script
    return {
        "model.module": "" if source or script else config.model.module,
        "model.source": _digest(source) if source else "",
        **({"model.script": _digest(script) if config.model.has_script_text else script} if script else {}),
        "training.batchSize": config.training.batch_size,
        "training.seed": config.training.seed,
        "data.shuffle": config.data.shuffle,
        **({"ps.replaceEmbeddings": least} if (least := config.replaces_embeddings) else {}),
    }


def _digest(text: str) -> str:
    return f"SHA-256 {hashlib.sha256(text.encode()).hexdigest()}"


def check(
    where: str,
    step: int,
    run: str,
    values: Mapping[str, Any],
    config: Config,
    run_id: str,
    within: int | None = None,
) -> tuple[str, ...]:
    """Check whether the job may resume from a checkpoint.

    Args:
        where: directory or address of the checkpoints.
        run: id of the run that has written the checkpoint.
        values: values that are stored in the checkpoint.
        run_id: run id of the job; empty: the job has not begun.
        within: the epoch, from 1, if the checkpoint is in the middle of one; None: at the end of an epoch.

    Returns:
        Descriptions of the values that differ and were forced (`checkpoint.force`).

    Raises:
        ConfigError: the checkpoint is of a different run and the job does not resume, or a value differs.
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
            f", in epoch {within}, whose records may count twice or not at all"
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
