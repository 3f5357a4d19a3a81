# SPDX-License-Identifier: Apache-2.0
"""`helm test`: what it says of a real master, healthy and broken."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from edl.config import values
from edl.contract import artifacts
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.errors import EdlError, MasterUnavailable, Unauthenticated
from edl.net.master_client import Client
from edl.net.probe import probe
from tests.support.jobs.commands import ROOT, a_long_job

pytestmark = pytest.mark.waits


@contextlib.contextmanager
def a_master_without_workers(directory: Path, *sets: str) -> Iterator[artifacts.Contact]:
    (directory / "values.json").write_text(json.dumps(values.load([], sets)))
    words = ["--values", f"{directory}/values.json", "--output", f"{directory}/job", "--backend", "external"]
    with subprocess.Popen(
        [sys.executable, "-m", "edl.master", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    ) as master:
        try:
            assert master.stdout is not None
            assert master.stdout.readline()
            yield artifacts.read_contact(directory / "job")
        finally:
            master.kill()


def test_a_job_that_trains_is_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    with a_long_job() as (_, output):
        contact = artifacts.read_contact(output)
        assert "records were trained on meanwhile" in probe(contact.address, contact.token, 20)
        Client(contact).stop("that is enough")
    with pytest.raises(MasterUnavailable, match="does not answer"):
        probe(contact.address, contact.token, 0.5)


def test_a_job_whose_workers_never_come_is_not_healthy(tmp_path: Path) -> None:
    words = "made no progress in 1 s: it is Starting with 0 of 2 workers in the ring"
    with a_master_without_workers(tmp_path, "workers=2") as contact, pytest.raises(EdlError, match=words):
        probe(contact.address, contact.token, 1)


def test_a_job_that_should_have_no_workers_is_healthy(tmp_path: Path) -> None:
    with a_master_without_workers(tmp_path, "workers=0") as contact:
        assert "the job is Suspended" in probe(contact.address, contact.token, 5)


def test_a_wrong_token_is_a_typed_error(tmp_path: Path) -> None:
    with a_master_without_workers(tmp_path, "workers=0") as contact, pytest.raises(Unauthenticated):
        probe(contact.address, "wrong", 5)


def test_the_exit_code_tells(tmp_path: Path) -> None:
    with a_master_without_workers(tmp_path, "workers=0") as contact:
        for token, code, said in ((contact.token, 0, ""), ("wrong", 1, "edl.net.probe: the job's token is")):
            environment = {**os.environ, "EDL_MASTER": contact.address, "EDL_TOKEN": token}
            command = [sys.executable, "-m", "edl.net.probe", "--seconds", "5"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
            assert (done.returncode, done.stderr[: len(said)]) == (code, said)


class AcceptsAnyToken(rpc.MasterServicer):
    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        yield pb.Status(json="{}")


def test_a_master_that_accepts_any_token_is_not_healthy() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    rpc.add_MasterServicer_to_server(AcceptsAnyToken(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(EdlError, match="callers that do not have the job's token"):
            probe(f"127.0.0.1:{port}", "the right one", 5)
    finally:
        server.stop(None).wait()
