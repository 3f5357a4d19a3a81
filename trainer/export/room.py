# SPDX-License-Identifier: Apache-2.0
"""Whether a container has the memory for a process more: over its limit, all of its processes are killed."""

from __future__ import annotations

from pathlib import Path

from edl.errors import EdlError

CGROUP = Path("/sys/fs/cgroup")  # of a container, as it sees it itself
MEBIBYTE = 1 << 20


def refuse_without(nbytes: int, cgroup: Path = CGROUP) -> None:
    """Refuse to use more memory than the container's limit leaves.

    Raises:
        EdlError: the container's limit does not leave as much.
    """
    if (there := left(cgroup)) is not None and there < nbytes:
        raise EdlError(
            f"to load the model again takes about {nbytes // MEBIBYTE:,} MiB, and the container's memory "
            f"limit leaves {max(there, 0) // MEBIBYTE:,} MiB; raise worker.resources.limits.memory, or set "
            "export.verify=false"
        )


def left(cgroup: Path = CGROUP) -> int | None:
    """Return the bytes of memory that the limit leaves; None if there is no limit.

    What the kernel can reclaim from files counts as free.
    """
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))
