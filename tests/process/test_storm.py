"""Storms of real faults on real workers, several seeds: the last line must say EXACT."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = 24


def storm(*arguments: str, seed: int | None = None, faults: int = FAULTS) -> str:
    """What scripts/storm says of a storm that has lost nothing."""
    seed = seed if seed is not None else random.SystemRandom().randrange(10**6)  # printed: repeatable
    done = subprocess.run(
        [ROOT / "scripts/storm", "--faults", str(faults), "--seed", str(seed), *arguments],
        capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("EXACT")
    seen = int(re.search(r"^faults +(\d+) in", done.stdout, re.M)[1])  # type: ignore[index]
    assert seen >= faults, "a storm without faults proves nothing"
    return done.stdout


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("workers", "seed", "several"), [(3, 11, True), (5, None, False)], ids=["several sums", "one sum"]
)
def test_a_storm_loses_nothing(workers: int, seed: int | None, several: bool) -> None:
    """What each weight counts float16 holds exactly: so it does not matter that they travel as such."""
    model = ["--model", "counting_many.py", "--records", "20000", "--epochs", "4"]
    more = [*model, "--set", "training.compression=float16"] if several else []
    said = storm("--workers", str(workers), *more, seed=seed)
    between = int(re.search(r"^between +(\d+) workers", said, re.M)[1])  # type: ignore[index]
    assert (between > 0) == several


@pytest.mark.timeout(400)
def test_a_storm_of_workers_and_servers_loses_nothing() -> None:
    """Some servers lose what they have written: then ring and servers go back, and nothing counts twice."""
    sizes = ["--records", "4000", "--epochs", "5"]
    storm("--workers", "3", "--model", "counting_rows.py", "--servers", "2", *sizes, faults=12)
