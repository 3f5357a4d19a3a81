# SPDX-License-Identifier: Apache-2.0
"""A server whose steps come in any order is killed: it comes back where it was, or where a checkpoint is."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.ps.errors import Invalid, Misplaced, Stale, Unavailable
from edl.ps.server import ParameterServer
from tests.support.models import counting_steps as counting
from tests.support.ps.async_server import (
    STEPS,
    Start,
    begin,
    begun,
    content,
    copied,
    counts,
    expect,
    push,
    steps,
    take,
)
from tests.support.ps.requests import RUN
from tests.support.ps.server_states import commit_manifest, write_part

# --- restart


def test_a_restarted_server_starts_no_generation_before_it_knows_its_update_mode(
    start: Start,
) -> None:
    """Else it would do so as a ring's server, whose steps come in order, and begin with nothing."""
    server = start()
    with pytest.raises(Misplaced, match="no tables are declared"):
        server.mode.start_generation(pb.StartGenerationRequest(run_id=RUN, generation=1))
    assert server.position().empty


def test_a_server_that_is_killed_comes_back_where_it_was(start: Start, tmp_path: Path) -> None:
    server = begun(start(), grads_to_wait=3)
    dice = random.Random(5)
    for number, step in enumerate(dice.sample(range(STEPS), STEPS)):
        push(server, step)
        if number % 5 == 1:
            push(server, step)
        if number % 7 == 3:
            server.async_server.keep(
                pb.KeepRequest(
                    run_id=RUN, incarnation=server.incarnation, step=number, order=number, ledger=b"\0x"
                )
            )
        if number % 9 == 4:
            server.async_server.reschedule(
                pb.RescheduleRequest(run_id=RUN, incarnation=server.incarnation, steps=steps(step, step + 9))
            )
        copied(tmp_path, "killed")
        assert content(start("killed")) == content(server), number
    server.async_server.drain(pb.DrainRequest(run_id=RUN, incarnation=server.incarnation, step=STEPS))
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    third = [value / 3 for value in expect(range(STEPS))[0]]
    assert np.allclose(counts(server), [third, third])


def test_the_log_is_replaced_by_a_snapshot_also_while_steps_wait(start: Start, tmp_path: Path) -> None:
    server = begun(start(snapshot_bytes=1), grads_to_wait=2)
    for step in (4, 2, 9):
        push(server, step)
    for order in range(1, 6):  # it grows
        keep = pb.KeepRequest(
            run_id=RUN, incarnation=server.incarnation, step=3, order=order, ledger=bytes(1 << 20)
        )
        server.async_server.keep(keep)
    capture = server.snapshot()
    assert capture is not None and server.snapshot() is None, "one at a time"
    capture.copy()
    push(server, 7)
    push(server, 8)
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    before = server._log.nbytes
    server.use_snapshot(capture, server.write_snapshot(capture))
    assert server._log.nbytes < before
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    push(server, 0)
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)


# --- checkpoints


def restore(server: ParameterServer, step: int, attempt: str = "a", generation: int = 1) -> pb.Position:
    request = pb.RestoreRequest(run_id=RUN, generation=generation, step=step, attempt=attempt)
    return server.async_server.restore(request)


def fallen(start: Start, name: str, index: int = 0, servers: int = 1) -> ParameterServer:
    """One that has lost its log."""
    server = start(name, index, servers)
    server.declare(counting.tables())
    assert server.position().empty
    return server


def two_after_six_steps(start: Start) -> list[ParameterServer]:
    """Both servers of a job, each with its first six steps."""
    both = [begun(start(f"log-{index}", index, 2)) for index in (0, 1)]
    for step in range(6):
        for server in both[::-1]:
            push(server, step)
    return both


def two_with_a_checkpoint(start: Start) -> list[ParameterServer]:
    """The same, and checkpoint `a` of these steps."""
    both = two_after_six_steps(start)
    keep = pb.KeepRequest(run_id=RUN, incarnation=both[0].incarnation, step=6, order=1, ledger=b"the ledger")
    both[0].async_server.keep(keep)
    commit_manifest(both[0], 6, "a", [write_part(server, 0, 6, "a") for server in both])
    return both


def test_a_whole_checkpoint_replaces_the_log_before_it(start: Start, tmp_path: Path) -> None:
    server = begun(start(), grads_to_wait=2)
    for step in (0, 1, 5):
        push(server, step)
    part = write_part(server, 0, 2, "a")
    push(server, 7)
    commit_manifest(server, 2, "a", [part])
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    server.committed(pb.CommittedRequest(run_id=RUN, step=2, attempt="a"))
    assert [path.name for path in sorted((tmp_path / "log").glob("log-*"))] == ["log-000000000002"]
    push(server, 3)
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    lost = start("lost")
    lost.declare(counting.tables(grads_to_wait=2))
    assert restore(lost, 2).step == 2
    assert lost.describe(0.0).accepted == steps(0, 2), (
        "what waited is not in the rows, so it is to be made again"
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_that_has_lost_its_log_has_its_part_of_a_checkpoint_and_the_rest_made_again(
    start: Start, victim: int
) -> None:
    both = two_with_a_checkpoint(start)
    for step in range(6, 12):
        for server in both[::-1]:
            push(server, step)
    push(both[1], 12)  # its worker dies now
    before = [server.incarnation for server in both]
    both[victim] = fallen(start, "another", victim, 2)
    assert restore(both[victim], 6).step == 6
    assert restore(both[victim], 6).step == 6, "the same again changes nothing"
    assert both[victim].incarnation != before[victim]
    request = pb.RescheduleRequest(
        run_id=RUN, incarnation=both[0].incarnation, steps=steps(6, 1 << 62) if victim else steps()
    )
    said = both[0].async_server.reschedule(request)
    assert said.step == 6
    assert said.incarnation != before[0]
    with pytest.raises(Misplaced, match="stale incarnation"):
        push(both[0], 6, incarnation=before[0])
    made = set()
    while found := take(both[0], worker=1, most=3):
        for step in range(found[0], found[-1]):
            made.add(step)
            for server in both[::-1]:
                push(server, step)
    assert made == set(range(6, STEPS))
    assert counts(*both) == expect(range(STEPS))
    assert both[0].async_server.kept.ledger == b"the ledger"


def test_a_server_without_a_log_is_empty_when_it_comes_back_and_goes_on_from_its_part(
    start: Start, tmp_path: Path
) -> None:
    server = begun(start(logged=False, snapshot_bytes=0), grads_to_wait=2)
    for step in (0, 1, 2):
        push(server, step)
    commit_manifest(server, 2, "a", [write_part(server, 0, 2, "a")])
    server.committed(pb.CommittedRequest(run_id=RUN, step=2, attempt="a"))
    assert server.snapshot() is None and not list((tmp_path / "log").iterdir())
    push(server, 3)
    server = start(logged=False)
    assert server.position().empty
    server.declare(counting.tables(grads_to_wait=2))
    assert restore(server, 2, "a").step == 2
    push(server, 2)
    push(server, 3)
    half = [value / 2 for value in expect(range(4))[0]]
    assert counts(server) == (half, half)


def test_without_a_checkpoint_a_server_begins_anew_and_all_is_made_again_for_it(start: Start) -> None:
    both = two_after_six_steps(start)
    both[1] = fallen(start, "another", 1, 2)
    assert restore(both[1], 0).empty
    begin(both[1])
    both[0].async_server.reschedule(
        pb.RescheduleRequest(run_id=RUN, incarnation=both[0].incarnation, steps=steps(0, 1 << 62))
    )
    while found := take(both[0], worker=1, most=5):
        for step in range(found[0], found[-1]):
            for server in both[::-1]:
                push(server, step)
    assert counts(*both) == expect(range(STEPS))
    assert both[0].async_server.progress().repeated == 6


def test_a_rollback_names_its_generation(start: Start, tmp_path: Path) -> None:
    server = begun(start())
    for step in range(4):
        push(server, step)
    commit_manifest(server, 4, "a", [write_part(server, 0, 4, "a")])
    incarnation = server.incarnation
    push(server, 4)
    with pytest.raises(Misplaced, match="the server has rows"):
        restore(server, 4, generation=0)
    assert restore(server, 4, generation=3).generation == 3
    assert counts(server) == expect(range(4)) and server.incarnation != incarnation
    push(server, 4)
    restore(server, 4, generation=3)
    assert counts(server) == expect(range(5)), "late: it is done"
    with pytest.raises(Stale, match="stale generation 2"):
        restore(server, 4, generation=2)
    with pytest.raises(Misplaced, match="already restored step 4"):
        restore(server, 0, "", generation=3)
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    assert restore(server, 0, "", generation=4).empty
    with pytest.raises(Misplaced, match="it has no rows yet"):
        push(server, 5)
    begin(server)
    assert counts(server) == expect([])


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_servers_goes_on_from_a_checkpoint_whose_parts_have_the_same_steps(
    start: Start, count: int
) -> None:
    two = two_with_a_checkpoint(start)
    push(two[1], 6)
    commit_manifest(two[0], 7, "b", [write_part(server, 0, 7, "b") for server in two])
    new = [fallen(start, f"new-{index}", index, count) for index in range(count)]
    for server in new:
        with pytest.raises(
            Invalid, match=r"step 7 was written by 2 servers.*\[0, 6\), and server 1 .*\[0, 7\)"
        ):
            restore(server, 7, "b")
        assert restore(server, 6, "a").step == 6
        for step in range(6, STEPS):
            push(server, step)
    assert counts(*new) == expect(range(STEPS))
    assert new[0].async_server.kept.ledger == b"the ledger"


def test_a_checkpoint_that_cannot_be_read_leaves_the_server_empty(start: Start, tmp_path: Path) -> None:
    server = begun(start())
    push(server, 0)
    commit_manifest(server, 1, "a", [write_part(server, 0, 1, "a")])
    part = next((tmp_path / "checkpoints").glob("*/part-*"))
    os.truncate(part, part.stat().st_size - 1)
    with pytest.raises(Unavailable, match=part.name):
        restore(server, 1)
    assert server.position().empty
    copied(tmp_path, "killed")
    assert start("killed").position().empty
    begin(server)
    push(server, 0)
    assert counts(server) == expect([0])
