# SPDX-License-Identifier: Apache-2.0
"""A real parameter server of mode=ps whose log finds no room, and that is killed afterwards."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import psutil
import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc
from tests.process.ps.test_killed_servers import SECONDS, Process, Worker
from tests.support.models import counting_steps as counting

pytestmark = pytest.mark.waits


def test_a_full_disk_refuses_a_step_that_counts_once_when_there_is_room_and_after_a_kill(
    tmp_path: Path,
) -> None:
    server, steps = Process(tmp_path / "server"), 16
    try:
        call = Worker(server)
        call("Declare", counting.tables())
        incarnation = call("Begin", counting.begin(steps)).incarnation
        pushes = [counting.push(incarnation, step, steps) for step in range(steps)]
        call("Push", pushes[0])
        [log] = (tmp_path / "server" / "log").glob("log-*")
        process = psutil.Process(server.process.pid)
        process.rlimit(psutil.RLIMIT_FSIZE, (log.stat().st_size + 50, psutil.RLIM_INFINITY))
        with (
            grpc.insecure_channel(server.address()) as channel,
            pytest.raises(grpc.RpcError, match=r"cannot be written.*nothing was changed"),
        ):
            ps_pb2_grpc.ParameterServerStub(channel).Push(
                pushes[1], metadata=[("authorization", "Bearer token")], timeout=SECONDS
            )
        said = call("Describe", pb.DescribeRequest())
        assert said.accepted.bounds == [0, 1] and said.log_bytes == log.stat().st_size
        process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        for push in pushes:
            call("Push", push)
        server.end(signal.SIGKILL)
        server.start()
        dense, rows = counting.counts(steps, [call("Pull", counting.pull(steps)).rows])
        assert (dense == 1).all() and (rows == 1).all()
        call.close()
    finally:
        server.process.kill()
        server.process.wait()
