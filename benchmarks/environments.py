# SPDX-License-Identifier: Apache-2.0
"""The peers' environments: each has its own, made once in the user's cache. Never used in CI."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from benchmarks.recorder import ROOT

TORCH = ("torch==2.15.0", "numpy==2.4.6")
PACKAGES = {
    "torch": (*TORCH, "torchft==0.2.0"),
    "ray": (*TORCH, "ray[train]==2.60.0", "tensorflow-cpu==2.21.0"),
    "keras2": ("tensorflow-cpu==2.21.0", "tf_keras==2.21.0"),
}


@cache
def python(name: str) -> str:
    """The Python of an environment: edl's own, `horovod` (stock, compiled), or one of PACKAGES."""
    if name == "edl":
        return sys.executable
    command = ["scripts/dev/bench-peer"]
    if name != "horovod":
        command = ["scripts/dev/bench-environment", name, *PACKAGES[name]]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def versions(name: str, *packages: str) -> dict[str, str]:
    """The versions of packages in an environment."""
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    done = subprocess.run(
        [python(name), "-c", code, *packages], check=True, stdout=subprocess.PIPE, text=True
    )
    return dict(zip(packages, done.stdout.split(), strict=True))
