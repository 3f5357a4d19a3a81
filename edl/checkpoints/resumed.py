"""Whether a job may go on from a checkpoint, by what its manifest says."""

from __future__ import annotations

from edl.checkpoints.manifest import Manifest
from edl.config import Config, lineage


def check_values(where: str, manifest: Manifest, config: Config, run_id: str) -> tuple[str, ...]:
    """What differs and was forced, in words.

    Args:
        where: the checkpoints' directory or address.
        run_id: of the job; empty: it has not begun.

    Raises:
        ConfigError: it is another run's and the job does not resume, or a value differs.
    """
    size = manifest.state.get("layout", {}).get("records", 0)
    within = manifest.epoch + 1 if size and manifest.records % size else None
    return lineage.check(where, manifest.step, manifest.run, manifest.config, config, run_id, within)
