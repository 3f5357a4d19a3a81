# SPDX-License-Identifier: Apache-2.0
"""The worker's loop with parameter servers: real loops on threads, a local ring, and servers over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from edl.checkpoints import Store
from edl.config import Config
from edl.contract.proto import edl_pb2 as pb
from edl.errors import ModelError
from edl.trainer.checkpoint.checkpointing import Checkpointing
from edl.trainer.embedding.interfaces import Commit
from edl.trainer.ps_client.client import PsClient
from edl.trainer.records.batches import Batches
from edl.trainer.ring.base import RingBroken
from edl.trainer.session.telemetry import Telemetry
from tests.support.fakes.parameter_server import FakeServer, Listening, rows_of
from tests.support.jobs.checkpoint_writers import LAYOUT, Queue, configured
from tests.support.jobs.workers import BATCH, CONFIG, POSITIONS, SIZE, STEPS, A, Held, come_to_sum, ring_of
from tests.support.models.counting import AtOnce, Positions
from tests.support.models.counting_rows import CountingRows, counts


class Servers:
    """Servers that listen."""

    def __init__(self, count: int, store: Store | None = None):
        self.store = store
        self.there = [Listening(FakeServer(index, count, store)) for index in range(count)]

    def another(self) -> PsClient:
        return PsClient.at([s.address for s in self.there], "token", "run-1", 7)

    def dies(self, index: int) -> None:
        self.there[index].kill()

    def comes_back(self, index: int, lost: bool = False) -> None:
        before = self.there[index]
        server = FakeServer(index, len(self.there), self.store) if lost else before.server
        self.there[index] = Listening(server, before.port)

    @property
    def counts(self) -> list[int]:
        return [int(n) for n in counts([s.server for s in self.there], POSITIONS)]

    @property
    def steps(self) -> list[int]:
        return [s.server.step for s in self.there]


class Losing(Held):
    """It may lose a sum that others have."""

    loses = False

    def reduce(self, vector: Any) -> Any:
        total = super().reduce(vector)
        if self.loses:
            raise RingBroken("the sum does not come back here")
        return total

    def close(self) -> None:
        super().close()
        self.loses = False


class Reachable(Protocol):
    """Servers to which a worker can connect."""

    def another(self) -> PsClient: ...


class LookingAhead(CountingRows):
    """It notes when the rows of the next step are requested."""

    def __init__(self, positions: int):
        super().__init__(positions)
        self.asked: list[tuple[int, int, int, int]] = []  # step, the commit's, its generation, updates

    def begin_pull(self, step: int, last: Commit) -> None:
        self.asked.append((step, last.step, last.generation, self.updates))


class W(A[Losing]):
    """A worker whose model has rows on servers."""

    def __init__(self, number: int, servers: Reachable, config: Config = CONFIG, where: Path | None = None):
        learner = LookingAhead(POSITIONS)
        super().__init__(number, learner, config, Losing())
        self.servers = learner.rows = servers.another()
        self.session.cuts(self._cut)
        batches = Batches(Positions(SIZE), BATCH, reading=AtOnce())
        report = Telemetry(self.session, batches.steps, log=lambda incarnation: None)
        self.beside = Queue()
        self.checkpoints = None
        if where is not None:
            self.checkpoints = Checkpointing(
                config,
                self.session,
                learner,
                Store.open(str(where)),
                "run-1",
                self.beside,
                servers=self.servers,
            )
        self.worker = self.assembled(
            config, batches, report, self._export, checkpoints=self.checkpoints, servers=self.servers
        )

    def _cut(self) -> None:
        self.ring.cut()
        self.servers.cut()

    def _export(self, final_metrics: Any) -> None:
        self.servers.pull(self.worker.state.step, ())
        self.session.say(finished=pb.Finished(model="model.keras"))


@pytest.fixture
def make() -> Iterator[Callable[..., Servers]]:
    made: list[Servers] = []

    def one(*of: Any) -> Servers:
        made.append(Servers(*of))
        return made[-1]

    yield one
    for servers in made:
        for server in servers.there:
            server.kill()


def with_a_checkpoint(make: Callable[..., Servers], where: Path, count: int = 1) -> tuple[Servers, W]:
    """So many servers and a worker that is a ring alone, at step 2, with a checkpoint of it."""
    servers = make(count, Store.open(str(where)))
    worker = W(0, servers, configured(where), where)
    ring_of(worker)
    write([worker], 2)
    return servers, worker


def end(generation: int, *workers: W) -> None:
    """They train to the end of the job."""
    for w in workers:
        w.ring.free()
    for w in workers:
        out = w.says("left_ring", generation)
        assert (out.step, out.broken) == (STEPS, "")
        assert (w.learner.weights == 1).all()


def stop(*workers: W) -> None:
    for w in workers:
        w.ring.free()
        w.stop()
        w.servers.cut()


# --- steps


def test_every_row_counts_once_and_all_servers_are_at_the_last_step(make: Callable[..., Servers]) -> None:
    servers = make(2)
    pair = [W(0, servers), W(1, servers)]
    ring_of(*pair)
    end(1, *pair)
    assert servers.counts == [1] * POSITIONS
    assert servers.steps == [STEPS] * 2
    assert pair[0].says("joined_ring", 1).rolled_back == ""
    stop(*pair)


def test_gradients_are_on_the_servers_before_the_sums_of_their_step(make: Callable[..., Servers]) -> None:
    servers = make(1)
    pair = [W(0, servers), W(1, servers)]
    ring_of(*pair)
    come_to_sum(1, *pair)
    server = servers.there[0].server
    assert sorted(server.staged) == [0, 1] and server.step == 0, "those of both ranks, and none is applied"
    come_to_sum(2, *pair)
    assert server.step == 1
    stop(*pair)


def test_the_next_rows_are_requested_with_the_commit_before_the_step_is_applied(
    make: Callable[..., Servers],
) -> None:
    servers = make(1)
    pair = [W(0, servers), W(1, servers)]
    ring_of(*pair)
    end(1, *pair)
    generation = servers.there[0].server.generation
    for w in pair:
        assert isinstance(w.learner, LookingAhead)
        assert w.learner.asked == [(step + 1, step, generation, step) for step in range(STEPS)]
    stop(*pair)


def test_who_has_no_records_tells_the_servers_of_each_step_too(make: Callable[..., Servers]) -> None:
    servers = make(1)
    pair = [W(0, servers), W(1, servers)]
    ring_of(*pair, shares=(1, 0))
    come_to_sum(2, *pair)
    pulls = [request for method, request in servers.there[0].calls if method == "Pull"]
    assert sorted((r.step, len(r.ids)) for r in pulls) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    stop(*pair)


def test_a_server_that_dies_and_keeps_its_log_is_waited_for_and_nothing_is_done_twice(
    make: Callable[..., Servers],
) -> None:
    servers = make(2)
    pair = [W(0, servers), W(1, servers)]
    ring_of(*pair)
    come_to_sum(3, *pair)
    servers.dies(0)
    for w in pair:
        w.ring.free()
    servers.there[1].reaches(3)
    servers.comes_back(0)
    end(1, *pair)
    assert servers.counts == [1] * POSITIONS
    stop(*pair)


# --- from ring to ring


def test_a_step_that_only_a_dead_worker_and_the_servers_had_is_taken_back_and_trained_again(
    make: Callable[..., Servers],
) -> None:
    servers = make(2)
    dies, lives = W(0, servers), W(1, servers)
    ring_of(dies, lives)
    come_to_sum(3, dies, lives)
    dies.ring.go_on()  # it has the step, and the servers hear of it
    for server in servers.there:
        server.reaches(3)
    lives.ring.loses = True
    lives.ring.free()
    assert lives.says("left_ring", 1).step == 2
    assert servers.steps == [3, 3]
    ring_of(lives, generation=2, step=2, sync=False)
    end(2, lives)
    assert servers.counts == [1] * POSITIONS
    assert lives.says("joined_ring", 2).rolled_back == ""
    stop(dies, lives)


def test_a_newcomer_that_is_left_alone_tells_the_servers_of_the_last_step_that_it_was_sent(
    make: Callable[..., Servers],
) -> None:
    servers = make(2)
    old, new = W(0, servers), W(1, servers)
    ring_of(old, epochs=1)
    old.ring.free()
    assert old.says("left_ring", 1).step == SIZE // BATCH
    ring_of(old, new, generation=2, step=3, joining=[1], sync=False)
    new.ring.free()
    assert new.says("left_ring", 2).step == STEPS
    assert new.worker.state.ledger.commit == old.worker.state.ledger.commit
    ring_of(new, generation=3, step=STEPS, sync=False)
    assert new.says("joined_ring", 3).rolled_back == ""
    assert servers.counts == [1] * POSITIONS
    stop(old, new)


def test_where_a_server_has_lost_its_rows_ring_and_servers_begin_again(make: Callable[..., Servers]) -> None:
    servers = make(2)
    pair = [W(0, servers), W(1, servers)]
    ring_of(*pair)
    come_to_sum(3, *pair)
    servers.dies(1)
    servers.comes_back(1, lost=True)
    for w in pair:
        w.ring.free()
    broken = [w.says("left_ring", 1).broken for w in pair]
    assert any("has come back with nothing: it has lost its log" in why for why in broken)
    step = max(w.worker.state.step for w in pair)
    root = next(w for w in pair if w.worker.state.step == step)
    other = next(w for w in pair if w is not root)
    ring_of(root, other, generation=2, step=step, sync=other.worker.state.step < step)
    for w in (root, other):
        joined = w.says("joined_ring", 2)
        assert (joined.step, joined.rolled_back) == (0, "parameter server 1 has lost its log and rows")
    end(2, *pair)
    assert servers.counts == [1] * POSITIONS
    stop(*pair)


# --- checkpoints


def write(workers: list[W], step: int) -> None:
    """A checkpoint of this step, from the master's order to the manifest."""
    come_to_sum(step - 1, *workers)
    workers[0].hears(1, checkpoint=pb.Checkpoint())
    come_to_sum(step + 1, *workers)
    for w in workers:
        w.beside.does()
    parts = [m.checkpoint_part for w in workers for m in w.said if m.HasField("checkpoint_part")]
    parts.sort(key=lambda part: part.index)
    assert [part.of for part in parts] == [len(parts)] * len(parts)
    order = pb.CommitCheckpoint(step=step, attempt=parts[0].attempt, parts=parts)
    workers[-1].hears(commit_checkpoint=order)
    workers[-1].beside.does()
    assert workers[-1].says("checkpointed", 0).step == step


def test_a_checkpoint_has_a_part_of_each_server_of_exactly_its_step(
    make: Callable[..., Servers], tmp_path: Path
) -> None:
    store = Store.open(str(tmp_path))
    servers = make(3, store)
    pair = [W(n, servers, configured(tmp_path), tmp_path) for n in (0, 1)]
    ring_of(*pair)
    write(pair, 2)
    (made,) = store.checkpoints()
    made.verify()
    assert len(made.manifest.parts) == 5 and len(made.manifest.of_servers) == 3
    assert made.manifest.state["servers"]["count"] == 3
    rows = rows_of(made)
    assert sorted(id_ for _, id_ in rows) == list(range(2 * BATCH)) and {r[0] for r in rows.values()} == {1.0}
    assert list(made.read()) == ["counts"], "rows are for the servers to read"
    for server in servers.there:
        assert server.comes_to("Committed").step == 2
    stop(*pair)


def test_a_damaged_part_of_a_server_damages_the_checkpoint(
    make: Callable[..., Servers], tmp_path: Path
) -> None:
    store = Store.open(str(tmp_path))
    pair = [W(n, make(1, store), configured(tmp_path), tmp_path) for n in (0,)]
    ring_of(*pair)
    write(pair, 2)
    stop(*pair)
    (made,) = store.checkpoints()
    (name,) = made.manifest.of_servers
    file = tmp_path / made.directory / name
    file.write_bytes(file.read_bytes().replace(b"1.0", b"2.0"))
    told: list[str] = []
    assert store.load_newest(told.append) is None
    assert name in told[0] and "its SHA-256 is not the one in the manifest" in told[0]


def test_ring_and_servers_go_back_to_the_newest_checkpoint_together(
    make: Callable[..., Servers], tmp_path: Path
) -> None:
    servers = make(2, Store.open(str(tmp_path)))
    pair = [W(n, servers, configured(tmp_path), tmp_path) for n in (0, 1)]
    ring_of(*pair)
    write(pair, 2)
    come_to_sum(4, *pair)
    servers.dies(0)
    servers.comes_back(0, lost=True)
    pair[0].hears(1, leave=pb.Leave())
    for w in pair:
        w.ring.free()
    step = pair[0].says("left_ring", 1).step
    pair[1].says("left_ring", 1)
    root, other = sorted(pair, key=lambda w: -w.worker.state.step)
    ring_of(root, other, generation=2, step=step, sync=True)
    for w in pair:
        joined = w.says("joined_ring", 2)
        assert (joined.step, joined.rolled_back) == (2, "parameter server 0 has lost its log and rows")
    end(2, *pair)
    assert servers.counts == [1] * POSITIONS
    stop(*pair)


def test_new_workers_and_another_number_of_servers_go_on_from_a_checkpoint(
    make: Callable[..., Servers], tmp_path: Path
) -> None:
    store = Store.open(str(tmp_path))
    pair = [W(n, make(2, store), configured(tmp_path), tmp_path) for n in (0,)]
    ring_of(*pair)
    write(pair, 2)
    stop(*pair)
    servers = make(3, store)
    new = [W(n, servers, configured(tmp_path), tmp_path) for n in (5, 6)]
    assert new[0].checkpoints is not None and new[0].checkpoints.newest(LAYOUT)[0] == 2
    ring_of(*new, step=2)
    for w in new:
        assert w.says("joined_ring", 1).step == 2
    end(1, *new)
    assert servers.counts == [1] * POSITIONS
    stop(*new)


def test_servers_that_are_ahead_of_new_workers_go_back_with_them(
    make: Callable[..., Servers], tmp_path: Path
) -> None:
    servers, old = with_a_checkpoint(make, tmp_path, 2)
    come_to_sum(5, old)
    new = W(1, servers, configured(tmp_path), tmp_path)
    ring_of(new, step=2)
    assert new.says("joined_ring", 1).step == 2
    end(1, new)
    assert servers.counts == [1] * POSITIONS
    stop(new, old)


def test_an_attempt_fails_with_a_server_and_the_training_goes_on(
    make: Callable[..., Servers], tmp_path: Path
) -> None:
    servers = make(1, Store.open(str(tmp_path)))
    w = W(0, servers, configured(tmp_path), tmp_path)
    ring_of(w)
    come_to_sum(1, w)
    w.hears(1, checkpoint=pb.Checkpoint())
    come_to_sum(2, w)
    servers.dies(0)
    w.ring.free()
    w.beside.does()
    assert "parameter server 0" in w.says("checkpoint_failed", 0).why
    servers.comes_back(0)
    end(1, w)
    assert servers.counts == [1] * POSITIONS
    stop(w)


def test_a_checkpoint_of_a_job_without_servers_is_refused_by_name(
    make: Callable[..., Servers], tmp_path: Path
) -> None:
    _, w = with_a_checkpoint(make, tmp_path)
    stop(w)
    plain = Checkpointing(w.config, w.session, w.learner, Store.open(str(tmp_path)), "run-1", Queue())
    with pytest.raises(
        ModelError, match="has rows of parameter servers, and this job does not have rows there"
    ):
        plain.newest(LAYOUT)


# --- the end


def test_a_model_whose_rows_are_lost_is_saved_after_ring_and_servers_went_back(
    make: Callable[..., Servers], tmp_path: Path
) -> None:
    servers, w = with_a_checkpoint(make, tmp_path)
    end(1, w)
    servers.dies(0)
    servers.comes_back(0, lost=True)
    w.hears(export=pb.Export())
    assert "parameter server 0" in w.says("rows_lost", 0).why
    ring_of(w, generation=2, step=STEPS, sync=False)
    joined = w.says("joined_ring", 2)
    assert (joined.step, joined.rolled_back) == (2, "parameter server 0 has lost its log and rows")
    end(2, w)
    assert servers.counts == [1] * POSITIONS
    w.hears(export=pb.Export())
    assert w.says("finished", 0).model == "model.keras"
    stop(w)


def test_who_is_to_end_while_it_saves_the_model_does_not_say_that_rows_are_lost(
    make: Callable[..., Servers],
) -> None:
    servers = make(1)
    w = W(0, servers)
    ring_of(w)
    end(1, w)
    servers.dies(0)
    w.hears(export=pb.Export())
    stop(w)
    assert not [m for m in w.said if m.HasField("rows_lost")]
