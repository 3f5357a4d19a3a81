"""What says that the tests of the cluster need not run again."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cluster import proved


def test_whatever_changes_in_what_makes_a_cluster_has_its_tests_run_again(tmp_path: Path) -> None:
    def changed() -> bool:
        return proved.digest(tmp_path) != proved.digest()

    for name in proved.MADE_FROM:
        here, there = proved.ROOT / name, tmp_path / name
        there.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if here.is_dir() else shutil.copy2)(here, there)
    assert not changed()
    for file in [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]:
        if "__pycache__" in file.parts:
            continue
        before = file.read_bytes()
        file.write_bytes(before + b"\n")
        assert changed(), file
        file.write_bytes(before)
    assert not changed()
    (tmp_path / "scripts/cluster").chmod(0o600)
    assert changed()
    (tmp_path / "scripts/cluster").chmod(0o755)
    (tmp_path / "tests/cluster/machine/more.py").touch()
    assert changed()
