# SPDX-License-Identifier: Apache-2.0
"""A fact is written once: all files that are generated from it are fresh."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("script", ["scripts/dev/schema", "scripts/dev/proto", "scripts/dev/docs"])
def test_generated_files_are_fresh(script: str) -> None:
    done = subprocess.run([ROOT / script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_changed_comment_makes_the_pages_stale_and_a_missing_one_is_named(tmp_path: Path) -> None:
    for name in ("scripts", "chart", "docs", "edl", "tests/chart/data"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    values = tmp_path / "chart" / "values.yaml"

    def schema(old: str, new: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        values.write_text(values.read_text().replace(old, new))
        script = tmp_path / "scripts" / "dev" / "schema"
        return subprocess.run([script, *arguments], capture_output=True, text=True)

    stale = schema(") Seed of", ") The seed of", "--check")
    assert stale.returncode == 1
    assert "values.schema.json is stale" in stale.stderr
    assert "configuration.md is stale" in stale.stderr
    assert schema(") The seed of", ") The seed of").returncode == 0
    assert "The seed of" in (tmp_path / "docs" / "configuration.md").read_text()
    done = schema("# -- (object) Labels of the nodes", "# Labels of the nodes", "--check")
    assert done.returncode == 1
    assert "no `# --` comment: nodeSelector, master.nodeSelector, worker.nodeSelector" in done.stderr


def test_the_lock_names_no_address() -> None:
    assert "://" not in (ROOT / "requirements.lock").read_text()
