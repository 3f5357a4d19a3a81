# SPDX-License-Identifier: Apache-2.0
"""Where `edl audit --release` puts the list of exported files that it reads from the output volume."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from edl.cli.release import audit as release_audit
from edl.cli.release.status import FoundRelease
from edl.contract import artifacts
from edl.errors import EdlError
from edl.kubernetes.names import Names

LISTED = b'{"exports": []}'


class Volume:
    """An output volume whose exports.json is LISTED."""

    async def whole(self, file: PurePosixPath) -> bytes:
        assert file.name == artifacts.EXPORTS
        return LISTED

    async def run(self, command: Sequence[str], take: Callable[[bytes], object]) -> None:
        raise AssertionError(f"no file is listed, but {command} is run")


@pytest.fixture(autouse=True)
def mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def volume(api: Any, found: FoundRelease) -> AsyncIterator[tuple[Volume, PurePosixPath]]:
        yield Volume(), PurePosixPath("/var/lib/edl")

    monkeypatch.setattr(release_audit, "mounted", volume)


def with_model(model: str) -> FoundRelease:
    """A release that has succeeded and whose status names this file as its model."""
    pod = {"spec": {"volumes": [{"name": "output", "persistentVolumeClaim": {"claimName": "kept"}}]}}
    job = {"metadata": {"labels": {}}, "data": {"values.json": "{}", "worker.yaml": json.dumps(pod)}}
    summary = json.dumps({"phase": "Succeeded", "records": {}, "model": model})
    status = {"data": {"phase": "Succeeded", "summary.json": summary}}
    return FoundRelease("team", "edl", Names("edl"), job, status)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the summary of a job that has exported its model."""
    folder = tmp_path / "a" / "copy"
    folder.mkdir(parents=True)
    (folder / artifacts.SUMMARY).write_text(json.dumps({"exports": {"keras": artifacts.MODEL}}))
    return folder


@pytest.mark.parametrize("model", ["model.keras", "run-2/model.keras", "a/b/c/model.keras"])
async def test_the_list_is_kept_beside_the_model(copy: Path, model: str) -> None:
    api: Any = None
    await release_audit._elsewhere(api, with_model(model), copy)
    assert ((copy / model).parent / artifacts.EXPORTS).read_bytes() == LISTED


@pytest.mark.parametrize("model", ["../../x", "run-2/../../x/model.keras", ".."])
async def test_a_path_that_leaves_the_copy_is_refused_by_name(copy: Path, tmp_path: Path, model: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    api: Any = None
    with pytest.raises(EdlError, match=r"without \.\. below the output volume") as refused:
        await release_audit._elsewhere(api, with_model(model), copy)
    assert repr(model) in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == before
