# SPDX-License-Identifier: Apache-2.0
"""The client of parameter servers has parts of checkpoints written and read, and gives them up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from edl.checkpoints import CheckpointError, Store
from edl.trainer.ps_client.calls import ServerRefused
from edl.trainer.ps_client.interfaces import PartNotWritten
from edl.trainer.ps_client.interrupt import Interrupt
from edl.trainer.ps_client.link import ServerLink
from tests.support.fakes.parameter_server import Refused
from tests.support.ps.client_jobs import SECONDS, Job


def test_servers_take_their_parts_before_the_next_step_and_write_them_beside_it(
    begun: Callable[..., Job], tmp_path: Path
) -> None:
    job = begun(2, Store.open(str(tmp_path)))
    job.takes_a_step(0, [1, 2, 3])
    may = threading.Event()
    for server in job.there:
        server.before = lambda method: may.wait(SECONDS) if method == "written" else None
    with job.client.take_parts(1, "an-attempt", 3) as written:
        job.takes_a_step(1, [1, 2, 3])  # while they write
        job.client.pull(2, ())
        may.set()
        parts = written()
    assert [part.name.split("-")[1] for part in parts] == ["00003", "00004"]
    job.client.claim(1)
    sizes = job.store.place.sizes("step-000000000001-an-attempt")
    assert sizes == {part.name: part.nbytes for part in parts}


def test_parts_that_are_not_waited_for_are_given_up(
    begun: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begun(2, Store.open(str(tmp_path)))
    job.takes_a_step(0, [1])
    goes_on = threading.Event()
    for server in job.there:
        server.before = lambda method: goes_on.wait(SECONDS) if method == "written" else None
    parts: list[Any] = []
    monkeypatch.setattr(Interrupt, "begins", lambda _, call: parts.append(call))
    with pytest.raises(OSError, match="disk full"), job.client.take_parts(1, "an-attempt", 1):
        raise OSError("disk full")
    assert [call.code() for call in parts] == [grpc.StatusCode.CANCELLED] * 2
    goes_on.set()


def test_a_part_is_not_waited_for_when_another_part_is_not_taken(
    begun: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begun(2, Store.open(str(tmp_path)))
    job.takes_a_step(0, [1])
    goes_on = threading.Event()
    job.there[1].before = lambda method: goes_on.wait(SECONDS) if method == "written" else None
    job.kill(0)
    parts: list[Any] = []
    monkeypatch.setattr(Interrupt, "begins", lambda _, call: parts.append(call))
    with pytest.raises(PartNotWritten, match="parameter server 0"):
        job.client.take_parts(1, "another", 1)
    assert parts[-1].code() is grpc.StatusCode.CANCELLED, "the part of server 1, which writes it"
    goes_on.set()


def test_a_part_that_cannot_be_written_fails_the_attempt_and_nothing_else(
    begun: Callable[..., Job], tmp_path: Path
) -> None:
    job = begun(2, Store.open(str(tmp_path)))
    job.takes_a_step(0, [1])
    job.kill(1)
    with (
        pytest.raises(PartNotWritten, match=r"parameter server 1 .* did not write its part: UNAVAILABLE"),
        job.client.take_parts(1, "an-attempt", 1) as written,
    ):
        written()
    assert not job.client.answer_within(0.1)
    back = job.beside(lambda: job.client.answer_within(SECONDS))
    job.comes_back(1)
    assert back.result()
    with job.client.take_parts(1, "another", 1) as written:
        assert len(written()) == 2
    job.takes_a_step(1, [1])
    job.kill(1)
    job.comes_back(1, lost=True)
    assert job.client.answer_within(SECONDS)  # a connection that is being tried again fails at once
    with (
        pytest.raises(CheckpointError, match="did not write its part: ") as refused,
        job.client.take_parts(2, "a third", 1) as written,
    ):
        written()
    assert refused.type is CheckpointError, "which it would say again"


def test_a_checkpoint_that_a_server_cannot_read_is_asked_for_again_and_then_refused(
    begun: Callable[..., Job],
) -> None:
    job = begun(1)
    words = "there is no checkpoint of step 3, attempt 'a'"
    tries = list[float]()

    def refuses(request: Any) -> None:
        tries.append(0.0)
        raise Refused(grpc.StatusCode.DATA_LOSS, words)

    connection = job.client._links[0]
    assert isinstance(connection, ServerLink)
    job.there[0].server._restore = refuses  # type: ignore[method-assign]
    connection.clock = lambda: 25.0 * len(tries)
    with pytest.raises(ServerRefused, match=words):
        job.client.restore(3, "a")
    assert len(tries) == 4, "it is asked again until a minute is over"
