# SPDX-License-Identifier: Apache-2.0
"""What says that the tests of the cluster need not run again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster import proved

HERE = Path(proved.__file__).parent


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
    (tmp_path / "tools/test_cluster/machine/more.py").touch()
    assert changed()


def items() -> list[Any]:
    """A test of each file that is proved, and one of another file."""
    names = [*sorted(proved.TESTS), "test_others.py"]
    return [SimpleNamespace(path=HERE / name, nodeid=f"tests/cluster/{name}::test") for name in names]


def collected(cache: Path, named: Sequence[str] = ()) -> tuple[proved.Proved, list[Any], list[Any]]:
    """What a run collects with this cache: the plugin, the tests that are run, those that are deselected."""
    plugin, run, deselected = proved.Proved(cache, list(named)), items(), list[Any]()
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config: Any = SimpleNamespace(hook=hook, getoption=lambda name: "")
    plugin.pytest_collection_modifyitems(config, run)
    return plugin, run, deselected


def stamps(cache: Path, outcomes: dict[str, str], of: str = "test_script.py") -> bool:
    """Whether a run leaves a stamp in which one test has these outcomes, and all others pass.

    Args:
        outcomes: by the phase of the test; "passed" without any.
    """
    plugin, run, _ = collected(cache)
    for item in run:
        told = outcomes if item.path.name == of else {}
        for when in ("setup", "call", "teardown"):
            if when == "call" and told.get("setup", "passed") != "passed":
                continue
            outcome: Any = told.get(when, "passed")
            phase: Any = when
            report = pytest.TestReport(item.nodeid, ("", 0, ""), {}, outcome, None, phase)
            plugin.pytest_runtest_logreport(report)
    plugin.pytest_sessionfinish()
    return bool(list(cache.iterdir()))


@pytest.mark.parametrize(
    ("when", "outcome"),
    [
        ("setup", "failed"),
        ("call", "failed"),
        ("teardown", "failed"),
        ("setup", "skipped"),
        ("call", "skipped"),
    ],
)
def test_a_run_in_which_a_test_does_not_pass_leaves_no_stamp(tmp_path: Path, when: str, outcome: str) -> None:
    assert not stamps(tmp_path, {when: outcome})


def test_a_run_in_which_all_pass_leaves_a_stamp_and_the_next_one_deselects_them(tmp_path: Path) -> None:
    assert stamps(tmp_path, {"teardown": "failed"}, of="test_others.py")
    plugin, run, deselected = collected(tmp_path)
    assert [item.path.name for item in run] == ["test_others.py"]
    assert {item.path.name for item in deselected} == proved.TESTS
    assert plugin.left_out == len(proved.TESTS)
    _, run, deselected = collected(tmp_path, named=["tests/cluster/test_script.py::test"])
    assert (len(run), deselected) == (len(items()), [])
