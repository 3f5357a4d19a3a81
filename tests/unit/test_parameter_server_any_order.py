"""A server whose steps come in any order: each counts once, and it comes back where it was."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from edl.contract.buckets import server_of
from edl.contract.proto import ps_pb2 as pb
from ps.durable import Server
from ps.errors import Invalid, Misplaced, OutOfMemory, Stale, Unavailable
from tests import counting_steps as counting
from tests.parameter_servers import RUN, stage
from tests.parameter_servers import tables as ring_tables
from tests.unit.test_parameter_server_log import commit_manifest, write_part

STEPS = 24
Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def make(directory: str = "log", index: int = 0, servers: int = 1, **more: Any) -> Server:
        return Server(index, servers, RUN, tmp_path / directory, str(tmp_path / "checkpoints"), **more)

    return make


def begun(server: Server, **asynchronous: Any) -> Server:
    server.declare(counting.tables(**asynchronous))
    begin(server)
    return server


def begin(server: Server) -> pb.Progress:
    request = counting.begin(STEPS, server.index, server.servers)
    return server.any_order.begin(request.SerializeToString())


def push(server: Server, step: int, **more: Any) -> pb.Progress:
    version = more.pop("version", server.version)
    line = more.pop("line", server.line)
    request = counting.push(line, step, STEPS, version, server.index, server.servers, **more)
    return server.any_order.push(request.SerializeToString())


def counts(*servers: Server) -> tuple[list[float], list[float]]:
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


def content(server: Server) -> tuple[Any, ...]:
    """All that is in a server, bit for bit, whatever the order."""
    found: list[Any] = [
        server.any_order.progress().SerializeToString(), server.any_order.taken.SerializeToString(),
        server.any_order.reopened.SerializeToString(), server.position().SerializeToString(),
        server.any_order.kept(pb.KeptRequest(run_id=RUN)).SerializeToString(),
        sorted((one.step, one.learning_rate) for one in server.any_order.taking.waiting),
    ]  # fmt: skip
    for table in server.tables:
        copy = table.copy(server.version)
        order = np.argsort(copy.ids)
        found += [
            getattr(copy, name)[order].tobytes() for name in ("ids", "steps", "counts", "rows", "slots")
        ]
    return tuple(found)


def copied(tmp_path: Path, name: str) -> Path:
    """As a machine finds it when the process is killed now."""
    shutil.rmtree(tmp_path / name, ignore_errors=True)
    return Path(shutil.copytree(tmp_path / "log", tmp_path / name))


def steps(*bounds: int) -> pb.Steps:
    return pb.Steps(bounds=bounds)


def take(server: Server, worker: int, most: int = 1, limit: int = STEPS) -> list[int]:
    request = pb.TakeRequest(run_id=RUN, line=server.line, worker=worker, most=most, limit=limit)
    return list(server.any_order.take(request).steps.bounds)


# --- a job begins with the rows of another


def page(
    number: int, ids: Any, more: bool = True, attempt: str = "one", start: pb.Start | None = None
) -> bytes:
    """Rows of `user` with the values of their ids; with the last page come the dense places."""
    rows = np.array(ids, np.int64)
    values = [counting.gradients(1, rows, rows[:, None])] if more else list(counting.begin(STEPS).values)
    request = pb.BeginRequest(run_id=RUN, values=values, attempt=attempt, page=number, more=more, start=start)
    return request.SerializeToString()


def user(server: Server, ids: list[int]) -> list[float]:
    asked = pb.PullRequest(run_id=RUN, ids=[pb.Ids(table=1, ids=np.array(ids, np.int64).tobytes())])
    return list(server.pull(asked)[0].tolist())


def test_rows_that_a_job_begins_with_are_there_with_the_last_page_or_not_at_all(
    start: Start, tmp_path: Path
) -> None:
    server = start()
    server.declare(counting.tables())
    calls = server.any_order
    calls.begin(page(0, [5, 7]))
    assert calls.begin(page(1, [9])).empty and calls.begin(page(1, [9])).empty, "it came twice"
    copied(tmp_path, "killed")
    half = start("killed")
    assert half.position().empty and not len(half.tables[1])
    with pytest.raises(Misplaced, match="page 2"):
        half.any_order.begin(page(2, [], more=False))
    with pytest.raises(Misplaced, match="another worker"):
        calls.begin(page(2, [], more=False, attempt="other"))
    for _ in range(2):
        assert not calls.begin(page(2, [], more=False)).empty
    assert user(server, [5, 6, 7, 9]) == [5, 0, 7, 9]
    push(server, 2)  # of which 6, 7 and 8 are the ids
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    assert user(server, [5, 6, 7, 9]) == [5, 1, 8, 9]


def test_pages_of_another_worker_begin_anew(start: Start) -> None:
    server = start()
    server.declare(counting.tables())
    server.any_order.begin(page(0, [5, 7]))
    server.any_order.begin(page(0, [9], attempt="other"))
    server.any_order.begin(page(1, [], more=False, attempt="other"))
    assert user(server, [5, 7, 9]) == [0, 0, 9]


def test_servers_of_any_number_read_the_rows_of_another_jobs_checkpoint(start: Start, tmp_path: Path) -> None:
    others = [begun(start(f"other-{index}", index, 2)) for index in range(2)]
    for other in others:
        for step in range(4):
            push(other, step)
    parts = [write_part(other, 0, 4, "a") for other in others]
    commit_manifest(others[0], 4, "a", parts)
    server = start("new")
    server.declare(counting.tables())
    where = str(tmp_path / "checkpoints")
    server.any_order.begin(page(0, [], start=pb.Start(directory=where, step=4, attempt="a", tables=["user"])))
    server.any_order.begin(page(1, [], more=False))
    shutil.rmtree(tmp_path / "checkpoints")
    assert counts(server) == ([0.0] * STEPS, expect(range(4))[1]), "dense weights come with the last page"
    shutil.copytree(tmp_path / "new", tmp_path / "killed")
    assert content(start("killed")) == content(server)


# --- each step counts once


def test_a_step_counts_once_however_often_it_comes_and_in_whatever_order(start: Start) -> None:
    server = begun(start())
    order = [step for step in range(STEPS) for _ in range(1 + step % 3)]
    random.Random(3).shuffle(order)
    for step in order:
        said = push(server, step, version=0)
    assert counts(server) == expect(range(STEPS))
    assert (said.version, said.step, said.taken) == (STEPS, STEPS, STEPS)
    assert said.repeated == len(order) - STEPS
    assert said.records == 3 * STEPS and said.loss == 2.0 * 3 * STEPS


def test_the_first_values_are_right_and_nobody_elses_change_them(start: Start) -> None:
    server = start()
    server.declare(counting.tables())
    assert server.position().empty
    request = counting.begin(STEPS)
    request.values[0].values = np.arange(STEPS, dtype=np.float32).tobytes()
    line = server.any_order.begin(request.SerializeToString()).line
    push(server, 3)
    again = begin(server)
    assert again.line == line and again.version == 1 and not again.empty
    expected = np.arange(STEPS, dtype=np.float32)
    expected[3] += 1
    assert server.pull(counting.pull(STEPS))[0].tolist() == expected.tolist()


def test_a_step_that_was_skipped_counts_as_made_and_changes_nothing(start: Start) -> None:
    server = begun(start())
    said = push(server, 0, skipped=True, loss=float("nan"))
    assert (said.step, said.version, said.records, said.loss) == (1, 0, 0, 0.0)
    assert counts(server) == expect([])
    push(server, 0)
    assert counts(server) == expect([])


def test_rows_come_with_the_number_of_their_updates(start: Start) -> None:
    server = begun(start())
    assert server.version == 0
    push(server, 5)
    push(server, 2)
    assert server.version == 2 and server.describe(0.0).taken == steps(2, 3, 5, 6)


# --- restart


def test_a_server_that_is_killed_comes_back_where_it_was(start: Start, tmp_path: Path) -> None:
    server = begun(start(), grads_to_wait=3)
    dice = random.Random(5)
    for number, step in enumerate(dice.sample(range(STEPS), STEPS)):
        push(server, step)
        if number % 5 == 1:
            push(server, step)
        if number % 7 == 3:
            server.any_order.keep(
                pb.KeepRequest(run_id=RUN, line=server.line, step=number, order=number, ledger=b"\0x")
            )
        if number % 9 == 4:
            server.any_order.reopen(
                pb.ReopenRequest(run_id=RUN, line=server.line, steps=steps(step, step + 9))
            )
        copied(tmp_path, "killed")
        assert content(start("killed")) == content(server), number
    server.any_order.drain(pb.DrainRequest(run_id=RUN, line=server.line, step=STEPS))
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    third = [value / 3 for value in expect(range(STEPS))[0]]
    assert np.allclose(counts(server), [third, third])


def test_the_log_is_replaced_by_a_snapshot_also_while_steps_wait(start: Start, tmp_path: Path) -> None:
    server = begun(start(snapshot_bytes=1), grads_to_wait=2)
    for step in (4, 2, 9):
        push(server, step)
    for order in range(1, 6):  # it grows
        keep = pb.KeepRequest(run_id=RUN, line=server.line, step=3, order=order, ledger=bytes(1 << 20))
        server.any_order.keep(keep)
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


def restore(server: Server, step: int, attempt: str = "a", generation: int = 1) -> pb.Position:
    request = pb.RestoreRequest(run_id=RUN, generation=generation, step=step, attempt=attempt)
    return server.any_order.restore(request)


def fallen(start: Start, name: str, index: int = 0, servers: int = 1) -> Server:
    """One that has lost its log."""
    server = start(name, index, servers)
    server.declare(counting.tables())
    assert server.position().empty
    return server


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
    assert lost.any_order.taken == steps(0, 2), "what waited is not in the rows, so it is to be made again"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_that_has_lost_its_log_has_its_part_of_a_checkpoint_and_the_rest_made_again(
    start: Start, victim: int
) -> None:
    both = [begun(start(f"log-{index}", index, 2)) for index in (0, 1)]
    for step in range(6):
        for server in both[::-1]:
            push(server, step)
    keep = pb.KeepRequest(run_id=RUN, line=both[0].line, step=6, order=1, ledger=b"the ledger")
    both[0].any_order.keep(keep)
    commit_manifest(both[0], 6, "a", [write_part(server, 0, 6, "a") for server in both])
    for step in range(6, 12):
        for server in both[::-1]:
            push(server, step)
    push(both[1], 12)  # its worker dies now
    before = [server.line for server in both]
    both[victim] = fallen(start, "another", victim, 2)
    assert restore(both[victim], 6).step == 6
    assert restore(both[victim], 6).step == 6, "the same again changes nothing"
    assert both[victim].line != before[victim]
    request = pb.ReopenRequest(run_id=RUN, line=both[0].line, steps=steps(6, 1 << 62) if victim else steps())
    said = both[0].any_order.reopen(request)
    assert said.step == 6
    assert said.line != before[0]
    with pytest.raises(Misplaced, match="went back"):
        push(both[0], 6, line=before[0])
    made = set()
    while found := take(both[0], worker=1, most=3):
        for step in range(found[0], found[-1]):
            made.add(step)
            for server in both[::-1]:
                push(server, step)
    assert made == set(range(6, STEPS))
    assert counts(*both) == expect(range(STEPS))
    assert both[0].any_order.kept(pb.KeptRequest(run_id=RUN)).ledger == b"the ledger"


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
    both = [begun(start(f"log-{index}", index, 2)) for index in (0, 1)]
    for step in range(6):
        for server in both[::-1]:
            push(server, step)
    both[1] = fallen(start, "another", 1, 2)
    assert restore(both[1], 0).empty
    begin(both[1])
    both[0].any_order.reopen(pb.ReopenRequest(run_id=RUN, line=both[0].line, steps=steps(0, 1 << 62)))
    while found := take(both[0], worker=1, most=5):
        for step in range(found[0], found[-1]):
            for server in both[::-1]:
                push(server, step)
    assert counts(*both) == expect(range(STEPS))
    assert both[0].any_order.progress().repeated == 6


def test_whoever_goes_back_says_in_which_generation(start: Start, tmp_path: Path) -> None:
    server = begun(start())
    for step in range(4):
        push(server, step)
    commit_manifest(server, 4, "a", [write_part(server, 0, 4, "a")])
    line = server.line
    push(server, 4)
    with pytest.raises(Misplaced, match="the server has rows"):
        restore(server, 4, generation=0)
    assert restore(server, 4, generation=3).generation == 3
    assert counts(server) == expect(range(4)) and server.line != line
    push(server, 4)
    restore(server, 4, generation=3)
    assert counts(server) == expect(range(5)), "late: it is done"
    with pytest.raises(Stale, match="generation 2 has passed"):
        restore(server, 4, generation=2)
    with pytest.raises(Misplaced, match="went back to step 4"):
        restore(server, 0, "", generation=3)
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
    assert restore(server, 0, "", generation=4).empty
    with pytest.raises(Misplaced, match="no rows yet"):
        push(server, 5)
    begin(server)
    assert counts(server) == expect([])


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_servers_goes_on_from_a_checkpoint_whose_parts_have_the_same_steps(
    start: Start, count: int
) -> None:
    two = [begun(start(f"two-{index}", index, 2)) for index in (0, 1)]
    for step in range(6):
        for server in two:
            push(server, step)
    two[0].any_order.keep(pb.KeepRequest(run_id=RUN, line=two[0].line, step=6, order=1, ledger=b"x"))
    commit_manifest(two[0], 6, "a", [write_part(server, 0, 6, "a") for server in two])
    push(two[1], 6)
    commit_manifest(two[0], 7, "b", [write_part(server, 0, 7, "b") for server in two])
    new = [fallen(start, f"new-{index}", index, count) for index in range(count)]
    for server in new:
        with pytest.raises(Invalid, match=r"step 7 is of 2 servers.*\[0, 6\), and server 1 .*\[0, 7\)"):
            restore(server, 7, "b")
        assert restore(server, 6, "a").step == 6
        for step in range(6, STEPS):
            push(server, step)
    assert counts(*new) == expect(range(STEPS))
    assert new[0].any_order.kept(pb.KeptRequest(run_id=RUN)).ledger == b"x"


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


# --- how they are taken


def test_synchronous_updates_are_the_mean_of_so_many_steps_and_a_drain_applies_the_rest(
    start: Start,
) -> None:
    server = begun(start(), grads_to_wait=4)
    for number, step in enumerate((3, 1, 2)):
        said = push(server, step)
        assert (said.version, said.taken) == (0, number + 1)
    assert counts(server) == expect([])
    said = push(server, 9)
    assert said.version == 1
    dense, _ = counts(server)
    assert [dense[step] for step in (1, 2, 3, 9)] == [0.25] * 4
    push(server, 0)
    push(server, 4)
    push(server, 20)
    request = pb.DrainRequest(run_id=RUN, line=server.line, step=5)
    said = server.any_order.drain(request)
    assert said.version == 2
    dense, _ = counts(server)
    assert [dense[step] for step in (0, 4, 20)] == [0.5, 0.5, 0.0], "that one is of the next stretch"
    assert server.any_order.drain(request).version == 2
    with pytest.raises(Misplaced, match=r"below 10, this server lacks \[5, 9\)"):
        server.any_order.drain(pb.DrainRequest(run_id=RUN, line=server.line, step=10))


def test_a_step_of_weights_that_are_too_old_is_refused_and_can_be_made_again(start: Start) -> None:
    server = begun(start(), max_staleness=2)
    for step in range(3):
        push(server, step)
    assert push(server, 3, version=0).refused
    assert counts(server) == expect(range(3)) and server.any_order.progress().taken == 3
    assert not push(server, 2, version=0).refused, "it is there"
    assert not push(server, 4, version=0, skipped=True).refused, "it changes nothing"
    assert not push(server, 3, version=1).refused
    assert counts(server) == expect(range(4))


def test_the_learning_rate_is_divided_by_the_age_of_the_weights(start: Start, tmp_path: Path) -> None:
    server = begun(start(), scale_rate=True)
    for step in range(4):
        push(server, step, version=0)
    dense, rows = counts(server)
    assert dense[:4] == rows[:4]
    assert np.allclose(dense[:4], [1, 1, 1 / 2, 1 / 3])
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)


# --- refusals


def test_calls_of_a_ring_are_refused_and_a_ring_refuses_those_of_any_order(start: Start) -> None:
    server = begun(start())
    for call in (
        lambda: server.stage(stage(1, 0).SerializeToString()),
        lambda: server.pull(pb.PullRequest(run_id=RUN, generation=1, step=0)),
        lambda: write_part(server, 3, 0, "a"),
    ):
        with pytest.raises(Misplaced, match="mode=ps"):
            call()
    ring = start("ring")
    with pytest.raises(Misplaced, match="no tables are declared"):
        _ = ring.any_order
    ring.declare(ring_tables())
    with pytest.raises(Misplaced, match="mode=hybrid"):
        _ = ring.any_order
    with pytest.raises(Misplaced, match="they are of mode=hybrid, not of mode=ps"):
        server.declare(ring_tables())
    with pytest.raises(Misplaced, match="max_staleness is 3, not 0"):
        server.declare(counting.tables(max_staleness=3))
    with pytest.raises(Invalid, match="grads_to_wait"):
        start("bad").declare(counting.tables(grads_to_wait=-1))


def test_what_is_of_another_line_or_cannot_be_right_is_refused_and_changes_nothing(start: Start) -> None:
    server = begun(start())
    push(server, 0)
    before = content(server)
    other = f"{RUN}/other"
    call = server.any_order
    for refused in (
        lambda: push(server, 1, line=other),
        lambda: call.take(pb.TakeRequest(run_id=RUN, line=other, most=1, limit=5)),
        lambda: call.drain(pb.DrainRequest(run_id=RUN, line=other, step=1)),
        lambda: call.reopen(pb.ReopenRequest(run_id=RUN, line=other, steps=steps(0, 1))),
        lambda: call.keep(pb.KeepRequest(run_id=RUN, line=other, step=1, order=1)),
    ):
        with pytest.raises(Misplaced, match="of the line 'run/other'"):
            refused()
    for wrong in (
        lambda: push(server, -1, gradients=[]),
        lambda: push(server, 1, gradients=[pb.Gradients(table=9)]),
        lambda: push(server, 1, gradients=[pb.Gradients(table=0, ids=bytes(8), values=bytes(4))]),
        lambda: take(server, 0, most=0),
        lambda: call.reopen(pb.ReopenRequest(run_id=RUN, line=server.line, steps=steps(3, 2))),
        lambda: call.reopen(pb.ReopenRequest(run_id=RUN, line=server.line, steps=steps(3))),
    ):
        with pytest.raises(Invalid):
            wrong()
    with pytest.raises(Misplaced, match="another"):
        call.kept(pb.KeptRequest(run_id="another"))
    one = begun(start("one", 1, 2))
    with pytest.raises(Misplaced, match="by server 0, and this is server 1"):
        take(one, 0)
    assert content(server) == before


def test_more_rows_than_the_memory_holds_are_refused_before_anything_is_changed(start: Start) -> None:
    server = begun(start(memory_limit=1 << 20), grads_to_wait=2)
    push(server, 0)
    before = content(server)
    ids = np.arange(20_000)
    large = [counting.gradients(1, ids, np.zeros((len(ids), 1)))]
    with pytest.raises(OutOfMemory, match=r"server 0 .* 1 MiB"):
        push(server, 1, gradients=large)
    assert content(server) == before
    push(server, 1)
    assert server.version == 1


def test_a_full_disk_refuses_with_words_and_changes_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = begun(start(), grads_to_wait=2)
    for step in (0, 1, 2):
        push(server, step)
    before, real = content(server), os.pwritev

    def full(file: int, pieces: Any, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    line, call = server.line, server.any_order
    for refused in (
        lambda: push(server, 3),
        lambda: push(server, 0),
        lambda: call.drain(pb.DrainRequest(run_id=RUN, line=line, step=3)),
        lambda: call.reopen(pb.ReopenRequest(run_id=RUN, line=line, steps=steps(0, 2))),
        lambda: call.keep(pb.KeepRequest(run_id=RUN, line=line, step=3, order=1)),
        lambda: write_part(server, 0, 3, "a"),
    ):
        with pytest.raises(Unavailable, match=r"No space left.*nothing was changed"):
            refused()
        assert content(server) == before
    assert take(server, 5) == [3, 4]
    monkeypatch.setattr(os, "pwritev", real)
    push(server, 3)
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)


# --- what is kept


def test_the_newest_of_what_is_kept_stays_and_the_loss_is_of_the_steps_since(start: Start) -> None:
    server = begun(start())
    assert server.any_order.kept(pb.KeptRequest(run_id=RUN)).ledger == b""
    for step in range(3):
        push(server, step)

    def keep(order: int, ledger: bytes) -> pb.Progress:
        request = pb.KeepRequest(run_id=RUN, line=server.line, step=3, order=order, ledger=ledger)
        return server.any_order.keep(request)

    assert keep(2, b"two").records == 0
    push(server, 3)
    assert keep(1, b"one").records == 3
    assert keep(2, b"again").records == 3, "it came twice"
    kept = server.any_order.kept(pb.KeptRequest(run_id=RUN))
    assert (kept.ledger, kept.order, kept.step) == (b"two", 2, 3)


# --- as Keras does it


@pytest.mark.parametrize(
    ("optimizer", "exact"),
    [
        (lambda: keras.optimizers.SGD(0.3), True),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), False),
        (lambda: keras.optimizers.Adagrad(0.1), False),
        (lambda: keras.optimizers.Adam(0.01), False),
        (lambda: keras.optimizers.Ftrl(0.1), False),
    ],
)
def test_one_workers_dense_variable_is_what_keras_makes_of_it(
    start: Start, optimizer: Any, exact: bool
) -> None:
    ours = optimizer()
    server = start()
    text = json.dumps(keras.optimizers.serialize(ours))
    server.declare(counting.tables(text))
    rng = np.random.default_rng(2)
    first = rng.normal(size=(STEPS // counting.DIM, counting.DIM)).astype(np.float32)
    ids = np.arange(len(first))
    request = pb.BeginRequest(run_id=RUN, values=[counting.gradients(0, ids, first)])
    server.any_order.begin(request.SerializeToString())
    theirs = keras.Variable(first)
    rate = float(ours.learning_rate)
    for step in range(20):
        change = rng.normal(size=first.shape).astype(np.float32)
        ours.apply([keras.ops.convert_to_tensor(change)], [theirs])
        push(server, step, learning_rate=rate, gradients=[counting.gradients(0, ids, change)])
    asked = pb.PullRequest(run_id=RUN, ids=[pb.Ids(table=0, ids=ids.tobytes())])
    found, expected = server.pull(asked)[0].reshape(first.shape), np.asarray(theirs)
    if exact:
        assert found.tobytes() == expected.tobytes()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_rows_of_several_servers_are_those_of_one(start: Start) -> None:
    one, three = begun(start("one")), [begun(start(f"three-{i}", i, 3)) for i in range(3)]
    for step in range(STEPS):
        for server in (one, *three):
            push(server, step)
    assert counts(one) == counts(*three) == expect(range(STEPS))
    assert all((server_of(server.tables[1].copy(0).ids, 3) == server.index).all() for server in three)


# --- forgetting


def test_rows_are_admitted_and_forgotten_by_the_servers_own_updates(start: Start, tmp_path: Path) -> None:
    server = start()
    tables = counting.tables()
    tables.tables[1].min_count, tables.tables[1].ttl_steps = 2, 10
    server.declare(tables)
    begin(server)

    def learn(step: int, ids: Any) -> None:
        ids = np.asarray(ids)
        push(server, step, gradients=[counting.gradients(1, ids, -np.ones((len(ids), 1)))])

    def row(id: int) -> float:
        asked = pb.PullRequest(run_id=RUN, ids=[pb.Ids(table=1, ids=np.array([id]).tobytes())])
        return float(server.pull(asked)[0][0])

    learn(20, [1])
    assert row(1) == 0.0
    learn(7, [1])
    assert row(1) == 1.0, "the second step that has it"
    for step in range(8, 17):
        learn(step, [2])
    assert row(1) == 1.0
    learn(2, [2])
    learn(3, [2])
    assert row(1) == 0.0, "no update has had it for so long"
    assert row(2) == 10.0
    copied(tmp_path, "killed")
    assert content(start("killed")) == content(server)
