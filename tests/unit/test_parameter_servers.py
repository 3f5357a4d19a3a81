"""What the master makes of its parameter servers: notices, the end of a job, numbers for people."""

from __future__ import annotations

from edl import config
from edl.config import values
from edl.contract import modes
from edl.contract.phases import Phase
from edl.contract.proto import ps_pb2 as pb
from edl.contract.reasons import Reason
from master.core import events as ev
from master.core import view
from master.http.metrics import Metrics
from master.servers import Watch, _Server
from tests.stories import Story


def notices(effects: list[ev.Effect]) -> list[ev.Notice]:
    return [e for e in effects if isinstance(e, ev.Notice)]


def test_a_server_that_dies_is_told_and_the_job_goes_on() -> None:
    job = Story(mode="hybrid").job
    job.handle(ev.Begin(), 0)
    [told] = notices(job.handle(ev.ServerExited(1, "SIGKILL", 2.0), 1))
    assert told.reason is Reason.ServerExited
    assert told.text == "parameter server 1 exited: SIGKILL; another one is started in its place in 2 s"
    [told] = notices(job.handle(ev.ServerListens(1, 0.5, again=True), 2))
    assert told == ev.Notice(Reason.ServerReady, "parameter server 1 listens again after 0.5 s")
    assert job.ending is None


def test_a_server_that_cannot_be_started_fails_the_job() -> None:
    job = Story(mode="hybrid").job
    job.handle(ev.Begin(), 0)
    job.handle(ev.ServerExited(0, "exit code 2: no such host", fatal=True), 1)
    assert job.ending == (Phase.Failed, "parameter server 0 exited: exit code 2: no such host")


def test_every_mode_is_one_task() -> None:
    tasks = {mode: modes.task_of(mode) for mode in ("train", "allreduce", "hybrid", "evaluate", "predict")}
    assert tasks == {"train": "train", "allreduce": "train", "hybrid": "train",
                     "evaluate": "evaluate", "predict": "predict"}  # fmt: skip


def test_a_job_has_servers_that_needs_them_or_that_does_not_train_and_says_how_many() -> None:
    def servers(*sets: str) -> int:
        return config.parse(values.load([], list(sets), [], [])).servers

    assert servers("mode=hybrid", "ps.servers=3") == 3
    assert servers("mode=hybrid") == servers("mode=ps") == servers("mode=hybrid", "ps.replicas=2") == 2
    assert servers("ps.servers=3") == servers("mode=allreduce") == servers("mode=evaluate") == 0
    assert servers("mode=predict", "ps.servers=3", "checkpoint.from=m.keras") == 3


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
