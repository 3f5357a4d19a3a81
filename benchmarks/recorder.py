# SPDX-License-Identifier: Apache-2.0
"""Raw records of published measurements: benchmarks/records/DATE-NAME/record.json.

Each figure of a measurement in README.md and docs/benchmark.md names its record, and a test compares them.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
PACKAGES = ("edl-trainer", "horovod", "keras", "tensorflow-cpu", "numpy")


class Recorder:
    """A record that is begun before a measurement and written after it.

    Args:
        name: the name of the record, without its date; empty: nothing is written.
    """

    def __init__(self, name: str):
        self._name = name
        self._began, self._load, self._commit = time.time(), os.getloadavg(), commit()

    def write(self, measured: Mapping[str, Any], versions: Mapping[str, Any] | None = None) -> Path | None:
        """Write what was measured, with commit, versions, machine and load.

        Args:
            measured: the raw values, which JSON can hold.
            versions: of the peers, by their environments.

        Returns:
            The file, or None without a name.
        """
        if not self._name:
            return None
        date = time.strftime("%Y-%m-%d", time.gmtime(self._began))
        file = RECORDS / f"{date}-{self._name}" / "record.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        content = {
            "command": f"scripts/bench {_module()} {' '.join(sys.argv[1:])}".strip(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            "seconds": round(time.time() - self._began),
            "commit": self._commit,
            "machine": {"cores": os.cpu_count(), "memory_gib": round(memory / 2**30)},
            "load": {"before": list(self._load), "after": list(os.getloadavg())},
            "versions": {
                "python": platform.python_version(),
                **{name: metadata.version(name) for name in PACKAGES},
                "environments": dict(versions or {}),
            },
            **measured,
        }
        file.write_text(json.dumps(content, indent=1) + "\n")
        return file


def _module() -> str:
    """The name of the running benchmark, as `scripts/bench` takes it."""
    path = Path(sys.argv[0])
    return path.parent.name if path.stem == "__main__" else path.stem


def commit() -> str:
    """The commit that was measured; `+` after it: the tree has changes to what is measured."""
    found = _git("rev-parse", "--short=12", "HEAD").strip()
    measured = ("edl", "master", "trainer", "ps", "patches", "benchmarks/*.py")
    changed = _git("status", "--porcelain", "--", *measured)
    return found + "+" * any(not line.startswith("??") for line in changed.splitlines())


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
