# SPDX-License-Identifier: Apache-2.0
"""Servers that are called directly: begun, trained, compared and checkpointed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from edl.checkpoints import Manifest, Store
from edl.contract.proto import ps_pb2 as pb
from edl.ps.server import ParameterServer
from tests.support.ps.requests import RUN, commit, pull, stage, start_generation, tables

Content = tuple[Any, ...]


def content(server: ParameterServer) -> Content:
    """Return the whole state of a server, bit for bit, in an order of its own."""
    found: list[Any] = [
        server.position().SerializeToString(),
        server.incarnation,
        sorted(server.mode.state.staged),
    ]
    for table in server.tables:
        copy = table.copy(server.mode.state.step)
        order = np.argsort(copy.ids)
        found += [
            getattr(copy, name)[order].tobytes() for name in ("ids", "steps", "counts", "rows", "slots")
        ]
    return tuple(found)


def begin(server: ParameterServer) -> ParameterServer:
    server.declare(tables())
    server.mode.start_generation(start_generation(1, 0))
    return server


def train(server: ParameterServer, start: int, stop: int, generation: int = 1) -> None:
    for step in range(start, stop):
        for rank in (1, 0):
            server.mode.push(stage(generation, step, rank).SerializeToString())
        server.pull(pull(generation, step + 1, last=commit(step, skipped=step % 5 == 4)))


def copied(tmp_path: Path, name: str) -> Path:
    """As a machine finds it when the process is killed now."""
    shutil.rmtree(tmp_path / name, ignore_errors=True)
    return Path(shutil.copytree(tmp_path / "log", tmp_path / name))


def checkpoint(server: ParameterServer, generation: int, step: int, attempt: str = "a") -> None:
    """The part of one server alone, and the manifest."""
    part = write_part(server, generation, step, attempt)
    commit_manifest(server, step, attempt, [part])


def write_part(server: ParameterServer, generation: int, step: int, attempt: str) -> Any:
    request = pb.WritePartRequest(
        run_id=RUN, generation=generation, step=step, attempt=attempt, index=server.index, of=server.servers
    )
    capture = server.capture(request)
    capture.copy()
    return server.write(capture, request)


def commit_manifest(server: ParameterServer, step: int, attempt: str, found: list[Any]) -> None:
    commit_parts(server._storage.checkpoints, step, attempt, found)


def commit_parts(directory: str | Path, step: int, attempt: str, parts: list[Any]) -> None:
    """Commit a checkpoint that consists of these parts of servers."""
    state = {"servers": {"parts": [part.name for part in parts], "count": len(parts)}}
    manifest = Manifest(
        step=step,
        run=RUN,
        attempt=attempt,
        epoch=0,
        records=0,
        model="",
        variables=(),
        parts=tuple(parts),
        state=state,
    )
    Store.open(str(directory)).begin(step, attempt).commit(manifest)
