"""A fact is written once: whatever is generated from it is fresh."""

import itertools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["scripts/schema", "scripts/proto", "scripts/docs"])
def test_generated_files_are_fresh(script: str) -> None:
    done = subprocess.run([ROOT / script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_value_has_a_comment() -> None:
    lines = (ROOT / "chart" / "values.yaml").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if re.match(r"\s*\w+: +\S", line):
            assert before.strip().startswith("# -- "), f"no comment: {line}"


def test_the_lock_names_no_address() -> None:
    assert "://" not in (ROOT / "requirements.lock").read_text()
