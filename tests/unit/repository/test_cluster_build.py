# SPDX-License-Identifier: Apache-2.0
"""What `scripts/cluster build` tells of its progress. The compiler only writes files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
touch "$2"
"""


def test_a_build_names_each_program_and_how_long_the_rest_takes(tmp_path: Path) -> None:
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text(COMPILER)
    go.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{go.parent}:{os.environ['PATH']}",
        "EDL_CACHE": str(tmp_path),
        "EDL_QUICK_CACHE": str(tmp_path),
        "PYTHONPATH": f"{ROOT}/tools/test_cluster:{ROOT}/scripts/dev",
    }
    program = """from machine import parts
parts.build("pause", "etcd", "kubelet")
print(parts.remaining([1, 2, 5], 0, 0))
print(parts.remaining([1, 2, 5], 1, 60))
print(parts.remaining([1, 2, 5], 2, 360))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stderr.splitlines() == [
        f"cluster: building 3 programs, once, into {tmp_path}/cluster: about 4 min on two idle cores, "
        "11 min beside other work",
        "cluster:   1 of 3: pause (0 min so far, 4 to 11 min to go)",
        "cluster:   2 of 3: etcd (0 min so far, 3 to 9 min to go)",
        "cluster:   3 of 3: kubelet (0 min so far, about 1 min to go)",
        "cluster:   built after 0 min",
    ]
    # On idle cores, and on cores that have other work: the first two took twice as long.
    assert done.stdout.splitlines() == ["8 to 24 min to go", "about 7 min to go", "about 10 min to go"]
