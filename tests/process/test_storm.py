"""Storms of real faults on real workers, several seeds: the last line must say EXACT."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = 24


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("workers", "seed"), [(3, 11), (5, None)])
def test_a_storm_loses_nothing(workers: int, seed: int | None) -> None:
    seed = seed if seed is not None else random.SystemRandom().randrange(10**6)  # printed: repeatable
    done = subprocess.run(
        [ROOT / "scripts/storm", "--faults", str(FAULTS), "--seed", str(seed), "--workers", str(workers)],
        capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("EXACT")
    faults = int(re.search(r"^faults +(\d+) in", done.stdout, re.M)[1])  # type: ignore[index]
    assert faults >= FAULTS, "a storm without faults proves nothing"
