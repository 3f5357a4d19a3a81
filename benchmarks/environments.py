# SPDX-License-Identifier: Apache-2.0
"""The peers' environments: each has its own, made once in the user's cache. Never used in CI."""

from __future__ import annotations

import os
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
    """The Python of an environment: edl's own, with `frameworks` or not, `horovod`, or one of PACKAGES."""
    if name in ("edl", "frameworks"):
        return sys.executable
    command = ["scripts/dev/bench-peer"]
    if name != "horovod":
        command = ["scripts/dev/bench-environment", name, *PACKAGES[name]]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


@cache
def folders(name: str) -> list[str]:
    """The folders of packages beside those of an environment's Python."""
    if name != "frameworks":
        return []
    return [subprocess.check_output(["scripts/dev/frameworks"], cwd=ROOT, text=True).strip()]


def versions(name: str, *packages: str) -> dict[str, str]:
    """The versions of packages in an environment."""
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders(name))}
    command = [python(name), "-c", code, *packages]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    return dict(zip(packages, done.stdout.split(), strict=True))
