# SPDX-License-Identifier: Apache-2.0
"""Check whether a job may resume from a checkpoint, according to the checkpoint's manifest."""

from __future__ import annotations

from edl.checkpoints.manifest import Manifest
from edl.config import Config, lineage


def check_values(where: str, manifest: Manifest, config: Config, run_id: str) -> tuple[str, ...]:
    """Describe the values that differ and were forced.

    Args:
        where: directory or address of the checkpoints.
        run_id: run id of the job; empty: the job has not begun.

    Raises:
        ConfigError: the checkpoint is of a different run and the job does not resume, or a value differs.
    """
    size = manifest.state.get("layout", {}).get("records", 0)
    within = manifest.epoch + 1 if size and manifest.records % size else None
    return lineage.check(where, manifest.step, manifest.run, manifest.config, config, run_id, within)
