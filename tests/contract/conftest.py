# SPDX-License-Identifier: Apache-2.0
"""The places of checkpoints, with one contract: a directory, memory, S3, and the volume of a master."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from edl.checkpoints import Store
from tests.support.checkpoints.master import serving as serving_files
from tests.support.checkpoints.s3 import Account, serving


@dataclass(frozen=True)
class Place:
    """A store, with access to its raw files."""

    url: str
    client: Any
    root: str

    @property
    def store(self) -> Store:
        """The store, opened as by a new process."""
        return Store.open(self.url)

    def files(self, directory: str = "") -> list[str]:
        """The paths of all files below a directory of the store."""
        self.client.invalidate_cache()
        return sorted(self.client.find(f"{self.root}/{directory}".rstrip("/")))


@pytest.fixture(scope="module")
def s3() -> Iterator[Account]:
    """An S3 server; the environment contains the account, as from the chart's Secret."""
    with serving() as account, pytest.MonkeyPatch.context() as patch:
        for name, text in account.variables.items():
            patch.setenv(name, text)
        yield account


@pytest.fixture(params=["directory", "memory", "s3", "master"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param == "master":
        with serving_files(tmp_path, monkeypatch):
            root = str(tmp_path / "checkpoints")
            yield Place("master://checkpoints", fsspec.filesystem("file"), root)
        return
    yield _elsewhere(request, tmp_path)


def _elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    name = tmp_path.name
    match request.param:
        case "directory":
            url = str(tmp_path / "not" / "there yet")
            return Place(url, fsspec.filesystem("file"), url)
        case "memory":
            return Place(f"memory://{name}", fsspec.filesystem("memory"), f"/{name}")
        case _:
            url = f"{request.getfixturevalue('s3').url}/{name}"
            return Place(url, fsspec.filesystem("s3", skip_instance_cache=True), url.removeprefix("s3://"))
