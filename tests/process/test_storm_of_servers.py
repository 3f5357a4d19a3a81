"""A storm of real faults on real workers and on the servers of their rows: the last line must say EXACT."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = 12


@pytest.mark.timeout(400)
def test_a_storm_of_workers_and_servers_loses_nothing() -> None:
    """Some servers lose what they have written: then ring and servers go back, and nothing counts twice."""
    seed = random.SystemRandom().randrange(10**6)  # printed: repeatable
    done = subprocess.run(
        [ROOT / "scripts/storm", "--faults", str(FAULTS), "--seed", str(seed), "--workers", "3",
         "--model", "counting_rows.py", "--servers", "2", "--records", "4000", "--epochs", "5"],
        capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("EXACT")
    faults = int(re.search(r"^faults +(\d+) in", done.stdout, re.M)[1])  # type: ignore[index]
    assert faults >= FAULTS, "a storm without faults proves nothing"
