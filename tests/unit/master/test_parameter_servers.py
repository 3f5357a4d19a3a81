# SPDX-License-Identifier: Apache-2.0
"""What the master makes of its parameter servers: notices, the end of a job, numbers for people."""

from __future__ import annotations

import asyncio
import math

from edl import config
from edl.config import values
from edl.contract import modes
from edl.contract.ids import WorkerId
from edl.contract.phases import Phase
from edl.contract.proto import ps_pb2 as pb
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import view
from edl.master.http.metrics import Metrics
from edl.master.parameter_servers.monitor import Watch, _Server
from edl.master.parameter_servers.remote import RemoteServers
from tests.support.jobs.stories import Story


def notices(effects: list[ef.Effect]) -> list[ef.Notice]:
    return [e for e in effects if isinstance(e, ef.Notice)]


def test_a_server_that_dies_is_told_and_the_job_goes_on() -> None:
    job = Story(mode="hybrid").job
    job.handle(ev.Begin(), 0)
    [told] = notices(job.handle(ev.ServerExited(1, "SIGKILL", 2.0), 1))
    assert told.reason is Reason.ServerExited
    assert told.text == "parameter server 1 exited: SIGKILL; it is restarted in 2 s"
    [told] = notices(job.handle(ev.ServerListens(1, 0.5, again=True), 2))
    assert told == ef.Notice(Reason.ServerReady, "parameter server 1 listens again after 0.5 s")
    assert job.ending is None


def test_a_server_that_cannot_be_started_fails_the_job() -> None:
    job = Story(mode="hybrid").job
    job.handle(ev.Begin(), 0)
    job.handle(ev.ServerExited(0, "exit code 2: no such host", fatal=True), 1)
    assert job.ending == (Phase.Failed, "parameter server 0 exited: exit code 2: no such host")


def test_every_mode_is_one_task() -> None:
    tasks = {mode: modes.task_of(mode) for mode in ("train", "allreduce", "hybrid", "evaluate", "predict")}
    assert tasks == {
        "train": "train",
        "allreduce": "train",
        "hybrid": "train",
        "evaluate": "evaluate",
        "predict": "predict",
    }


def test_a_job_has_servers_that_needs_them_or_that_does_not_train_and_says_how_many() -> None:
    def servers(*sets: str) -> int:
        return config.parse(values.load([], list(sets), [], [])).servers

    assert servers("mode=hybrid", "ps.servers=3") == 3
    assert servers("mode=hybrid") == servers("mode=ps") == servers("mode=hybrid", "ps.replicas=2") == 2
    assert servers("ps.servers=3") == servers("mode=allreduce") == servers("mode=evaluate") == 0
    assert servers("mode=predict", "ps.servers=3", "initFrom.path=m.keras") == 3


def test_rates_are_of_the_time_between_two_answers_and_a_restart_is_seen() -> None:
    server = _Server(0)
    server.note(pb.Description(rows_pulled=100, busy_seconds=1.0), 10.0)
    server.note(pb.Description(rows_pulled=300, busy_seconds=1.5), 12.0)
    assert (server.pulled, server.busy, server.restarts) == (100.0, 0.25, 0)
    server.note(pb.Description(rows_pulled=10, busy_seconds=0.1), 13.0)
    assert (server.pulled, server.busy, server.restarts) == (0.0, 0.0, 1)


def test_metrics_have_a_value_for_each_server() -> None:
    watch = Watch(lambda event: None, str, 2)
    watch._servers[1].note(pb.Description(memory=5, tables=[pb.TableState(name="t", rows=7)]), 1.0)
    job = Story(mode="hybrid").job
    status = {**view.status(job, 0), "servers": watch.status()}
    page = Metrics(lambda: status).page()[1].decode()
    assert 'edl_server_up{server="0"} 0.0' in page
    assert 'edl_server_up{server="1"} 1.0' in page
    assert 'edl_server_rows{server="1"} 7.0' in page
    assert 'edl_server_memory_bytes{server="1"} 5.0' in page
    assert 'edl_server_restarts_total{server="1"} 0.0' in page


# --- further servers, on a cluster


def description_of(server: int, servers: int, generation: int = 1) -> pb.Description:
    there = pb.ShardAssignment(servers=servers)
    return pb.Description(index=server, position=pb.Position(generation=generation), assignment=there)


class Pods:
    """Those that the chart has made, as a master sees them that begins in the middle of a move from two to
    three: the values say three, and the rows are on two."""

    def __init__(self, listen_timeout: float = math.inf) -> None:
        self.said: asyncio.Queue[ev.Event] = asyncio.Queue()
        self.scaled: list[int] = []
        self.servers = RemoteServers(
            self.said.put_nowait, str, "ps-{}".format, 3, self.scaled.append, listen_timeout
        )
        self.answers(0, servers=2)

    def answers(self, server: int, servers: int) -> None:
        self.servers._watch._servers[server].note(description_of(server, servers), 1.0)
        self.servers._looked()


async def test_a_master_that_begins_in_the_middle_of_a_move_has_it_finished_when_all_listen() -> None:
    pods = Pods()
    pods.answers(1, servers=2)
    assert pods.said.empty() and pods.scaled == [3], "until the ring reports which servers have the rows"
    pods.answers(2, servers=0)
    assert pods.said.get_nowait() == ev.ServersReady(3, ("ps-0", "ps-1", "ps-2"))
    pods.answers(0, servers=3)
    assert pods.said.empty()
    await pods.servers.close(ended=False)


async def test_a_master_that_begins_in_the_middle_of_a_move_gives_it_up_when_they_do_not() -> None:
    pods = Pods(listen_timeout=0.05)
    given_up = await asyncio.wait_for(pods.said.get(), 60)
    assert given_up == ev.ServersGivenUp(3, 2, "parameter server 1 does not answer at ps-1 after 0 s")
    pods.servers.perform(ef.Assigned(2, wanted=3))
    assert pods.scaled[-1] == 2 and pods.servers.wanted == 2
    pods.answers(0, servers=2)
    assert pods.said.empty(), "it is over"
    await pods.servers.close(ended=False)


def test_a_ring_that_has_moved_rows_under_an_earlier_master_is_believed() -> None:
    story = Story(workers=1).running(0)
    form = story.job.ring.generation
    effects = story.tell(ev.JoinedRing(WorkerId(0), form, 4, servers=3))
    assert not [e for e in effects if isinstance(e, ef.Leave)]
    effects = story.tell(ev.ServersReady(3, ("a", "b", "c")))
    assert [e.servers for e in effects if isinstance(e, ef.Assigned)] == [3]
    assert not [e for e in effects if isinstance(e, ef.Leave)]


async def test_a_server_that_hung_for_a_moment_and_was_left_out_is_found_by_its_generation() -> None:
    watch = Watch(lambda event: None, str, 2)
    one, other = watch._servers
    one.note(description_of(0, 2, generation=7), 1.0)
    told = description_of(1, 2, generation=6)
    other.note(told, 1.0)
    assert watch._lags(other, told)
    assert not watch._lags(other, told), "once for each ring"
    assert not watch._lags(one, description_of(0, 2, generation=7))
