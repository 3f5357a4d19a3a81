# SPDX-License-Identifier: Apache-2.0
"""Helpers for servers that receive steps in any order: call them without a network, read their content."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edl.contract.proto import ps_pb2 as pb
from edl.ps.server import ParameterServer
from tests.support.models import counting_steps as counting
from tests.support.ps.requests import RUN

STEPS = 24
Start = Callable[..., ParameterServer]


def starting(directory: Path) -> Start:
    """Return a function that starts servers with logs and checkpoints in `directory`."""

    def start(log: str = "log", index: int = 0, servers: int = 1, **more: Any) -> ParameterServer:
        return ParameterServer(index, servers, RUN, directory / log, str(directory / "checkpoints"), **more)

    return start


def begun(server: ParameterServer, **asynchronous: Any) -> ParameterServer:
    server.declare(counting.tables(**asynchronous))
    begin(server)
    return server


def begin(server: ParameterServer) -> pb.Progress:
    request = counting.begin(STEPS, server.index, server.servers)
    return server.async_server.begin(request.SerializeToString())


def push(server: ParameterServer, step: int, **more: Any) -> pb.Progress:
    version = more.pop("version", server.version)
    incarnation = more.pop("incarnation", server.incarnation)
    request = counting.push(incarnation, step, STEPS, version, server.index, server.servers, **more)
    return server.async_server.push(request.SerializeToString())


def counts(*servers: ParameterServer) -> tuple[list[float], list[float]]:
    answers = [
        [rows.copy() for rows in server.pull(counting.pull(STEPS, server.index, server.servers))]
        for server in servers
    ]
    dense, rows = counting.counts(STEPS, answers)
    assert (rows.reshape(-1, 3) == rows.reshape(-1, 3)[:, :1]).all(), "a step is in some of its rows"
    return dense.tolist(), rows.reshape(-1, 3)[:, 0].tolist()


def expect(steps: Any) -> tuple[list[float], list[float]]:
    found = [float(step in set(steps)) for step in range(STEPS)]
    return found, found


def content(server: ParameterServer) -> tuple[Any, ...]:
    """The whole content of a server, bit for bit, independent of its order."""
    found: list[Any] = [
        server.async_server.progress().SerializeToString(),
        server.async_server.state.accepted,
        server.async_server.state.rescheduled,
        server.position().SerializeToString(),
        server.async_server.kept.SerializeToString(),
        sorted((one.step, one.learning_rate) for one in server.async_server.state.waiting),
    ]
    for table in server.tables:
        copy = table.copy(server.version)
        order = np.argsort(copy.ids)
        found += [
            getattr(copy, name)[order].tobytes() for name in ("ids", "steps", "counts", "rows", "slots")
        ]
    return tuple(found)


def copied(tmp_path: Path, name: str) -> Path:
    """Copy the log as a machine would find it if the process were killed now."""
    shutil.rmtree(tmp_path / name, ignore_errors=True)
    return Path(shutil.copytree(tmp_path / "log", tmp_path / name))


def steps(*bounds: int) -> pb.Steps:
    return pb.Steps(bounds=bounds)


def take(server: ParameterServer, worker: int, most: int = 1, limit: int = STEPS) -> list[int]:
    request = pb.LeaseRequest(
        run_id=RUN, incarnation=server.incarnation, worker=worker, most=most, limit=limit
    )
    return list(server.async_server.lease(request).steps.bounds)
