# SPDX-License-Identifier: Apache-2.0
"""Hundreds of whole jobs under faults, each repeatable from its seed."""

import re
from collections import Counter
from typing import Any

import pytest

from edl.contract import steps as edl_steps
from edl.contract.proto.ps_pb2 import Progress
from edl.contract.reasons import Reason
from edl.contract.rows.wire import Bytes
from edl.master.backends.kubernetes import LeaderElection
from edl.master.core import completion, consistency, training
from edl.master.core import effects as ef
from edl.ps.asynchronous.applied_steps import AppliedSteps
from edl.ps.asynchronous.server import AsyncServer
from edl.ps.sync.staging import Steps
from edl.trainer.ps_client import messages
from edl.trainer.ps_client.server_group import ServerGroup
from tests.simulator import masters, servers
from tests.simulator.faults import DRAIN, KINDS, MOMENTS, RARE
from tests.simulator.worker import FLIP
from tests.simulator.world import SimulationFailed, World

pytestmark = pytest.mark.thorough

SEEDS = 400
SEEDS_OF_A_KIND = {1: 8, 2: 4}  # by the number of masters: a run with two takes longer
HAPPENS = {  # in some of these runs with one master
    servers.GONE: ["everything was lost", "a checkpoint was restored"],
    servers.GONE_COPIES: ["everything was lost", "a server was done without", "its rows were back"],
}


def run(seeds: int, masters: int | None = None, servers: str = "", flips: bool = False) -> None:
    for seed in range(seeds):
        World(seed, masters=masters, servers=servers, flips=flips).run()


@pytest.mark.timeout(600)  # a minute of CPU
def test_hundreds_of_simulated_jobs_count_every_record_once() -> None:
    faults, moments, ends = Counter[str](), Counter[str](), Counter[str]()
    losses = takeovers = 0
    for seed in range(SEEDS):
        world = World(seed)
        world.run()  # a failure says the seed, how to repeat it, and what came before
        faults += world.faults.kinds
        moments += world.faults.moments
        losses += world.job.restarts
        takeovers += world.takeovers if world.two else 0
        ends[world.job.phase] += 1
    kinds = {*KINDS, *RARE, *masters.KINDS, *servers.KINDS, FLIP, DRAIN}
    assert set(faults) == kinds, "a kind of fault never happened"
    assert set(moments) == {*MOMENTS, *servers.MOMENTS}, "a moment was never hit"
    assert faults.total() > 3 * SEEDS, "the simulator has hardly injected a fault"
    assert losses > 20, "it has hardly happened that all state was lost"
    assert takeovers > SEEDS / 100, "masters that stand by have hardly taken over"
    assert ends["Succeeded"] > 0.8 * SEEDS


@pytest.mark.parametrize("masters", SEEDS_OF_A_KIND)
@pytest.mark.parametrize("kind", [*servers.KINDS_OF_JOBS, *servers.GONES])
def test_jobs_on_servers_count_every_record_once(kind: str, masters: int) -> None:
    """Also while masters change, and where servers are done without or all processes and logs are lost."""
    happened = Counter[str]()
    for seed in range(SEEDS_OF_A_KIND[masters]):
        world = World(seed, masters=masters, servers=kind)
        world.run()
        assert world.servers is not None
        told = [e for _, _, effects in world.watchdog.history for e in effects if isinstance(e, ef.Notice)]
        happened += Counter(
            {
                "another master took over": world.takeovers if world.two else 0,
                "everything was lost": world.faults.kinds["everything"],
                "a checkpoint was restored": sum(step > 0 for step in world.servers.rolled_back),
                "a server was done without": sum(e.reason is Reason.ServerRemoved for e in told),
                "its rows were back": sum("have their rows again" in e.text for e in told),
            }
        )
    expected = ["another master took over"] if masters == 2 else HAPPENS.get(kind, [])
    assert [what for what in expected if not happened[what]] == []


@pytest.mark.parametrize(("masters", "seeds"), [(1, range(19, 29)), (2, range(1))])
def test_servers_that_hang_are_restarted_and_a_ring_with_copies_does_not_wait_for_them(
    masters: int, seeds: range
) -> None:
    faults, passed_over = Counter[str](), 0
    for kind in servers.STUCKS:
        for seed in seeds:
            world = World(seed, masters=masters, servers=kind)
            world.run()
            assert world.servers is not None
            faults += world.faults.kinds
            passed_over += world.servers.stuck.passed_over
    assert faults["stuck server"] > 0
    assert masters == 2 or (faults["restart"] > len(seeds) / 2 and passed_over > 1)


def test_states_that_silently_differ_are_found_and_every_record_counts_once() -> None:
    dropped = rolled_back = 0
    for seed in range(20, 40):
        world = World(seed, flips=True)
        world.run()
        told = [e for _, _, effects in world.watchdog.history for e in effects if isinstance(e, ef.Notice)]
        differed = [e.text for e in told if e.reason is Reason.ReplicaDivergence]
        dropped += sum("dropped" in text for text in differed)
        rolled_back += sum("all go back" in text for text in differed)
    assert dropped > 3 and rolled_back > 3


def test_a_checkpoint_of_states_that_differ_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "at_checkpoint", lambda job, event: True)
    with pytest.raises(SimulationFailed, match=r"seed \d+: .*parts of different states"):
        run(20, flips=True)


def test_a_run_repeats_from_its_seed_wherever_its_objects_lie_in_memory() -> None:
    times = set[tuple[float, ...]]()
    others: list[object] = []
    for number in range(5):
        world = World(21066, servers="moves")
        world.run()
        times.add(tuple(now for now, _, _ in world.watchdog.history))
        others += [object() for _ in range(37 * number)]
    assert len(times) == 1


def test_a_second_copy_that_learns_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    add = messages.add_values

    def first_alone(to: Any, index: int, values: Any, shares: Any) -> bool:
        return add(to, index, values, [copies[:1] for copies in shares])

    monkeypatch.setattr("edl.trainer.ps_client.client.add_values", first_alone)
    with pytest.raises(SimulationFailed, match=r"the rows of [\s\S]* on server \d+ count"):
        run(20, servers="ps-copies")


class Begun:
    """Waits in one run for an epoch with a later step taken, and the first one not: then fewer
    epochs are wanted, and a worker dies."""

    def __init__(self, world: World):
        self.world, self.found = world, False
        self._steps = edl_steps.Steps(world.size, world.batch)

    def look(self, applied: AppliedSteps) -> None:
        further = self._steps.ends_epoch(applied.step) and len(applied.accepted) > applied.step
        if further and not self.found and self.world.master.lives and not self.world.ended:
            self.found = True
            self.world.clock.later(0.0, lambda: self._strike(self._steps.epoch(applied.step)))

    def _strike(self, epochs: int) -> None:
        self.world.wants_epochs(epochs)
        self.world.faults.strike("kill", "now")


def test_an_epoch_of_which_any_step_is_taken_is_trained_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    push, found = AsyncServer.push, 0
    for seed in range(145, 157):
        begun = Begun(World(seed, servers="ps"))

        def pushed(way: AsyncServer, raw: Bytes, begun: Begun = begun) -> Progress:
            answer = push(way, raw)
            begun.look(way.state)
            return answer

        monkeypatch.setattr(AsyncServer, "push", pushed)
        begun.world.run()
        found += begun.found
    assert found > 2


@pytest.mark.parametrize("masters", [1, 2])
def test_a_run_repeats_from_its_seed(masters: int) -> None:
    histories = []
    for _ in range(2):
        world = World(4711, masters=masters)
        world.run()
        histories.append(world.watchdog.history)
    assert histories[0] == histories[1]


def test_a_wrong_decision_is_noticed_and_the_failure_says_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The root's step is not taken over.
    monkeypatch.setattr(training, "go_on_from", lambda job, step, checkpoint=False: None)
    with pytest.raises(
        SimulationFailed, match=r"seed \d+: .*\nrepeat with: python -m tests.simulator --seed"
    ):
        run(50)


@pytest.mark.parametrize(
    ("kind", "where", "promise", "broken", "noticed"),
    [
        # what was staged for a step is not applied
        ("hybrid", Steps, "_in_order", lambda steps: (), "count"),
        # an accepted step is not applied
        (
            "ps",
            AsyncServer,
            "_apply",
            lambda server, applied, update: setattr(server, "state", applied),
            r"worker \d+: \[",
        ),
        # members of a ring do not hear where its rows are
        ("moves", ServerGroup, "adopt", lambda *_: None, "members of one ring speak to"),
    ],
)
def test_servers_that_break_a_promise_are_noticed(
    monkeypatch: pytest.MonkeyPatch, kind: str, where: type, promise: str, broken: Any, noticed: str
) -> None:
    monkeypatch.setattr(where, promise, broken)
    with pytest.raises(SimulationFailed, match=rf"seed \d+: .*{noticed}"):
        run(50, servers=kind)


def test_a_job_that_does_not_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "export", lambda job, root: None)
    with pytest.raises(SimulationFailed, match=r"the job does not end: |wait long to join the ring"):
        run(20)


async def always(election: LeaderElection, term: int) -> bool:
    return True


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("promise", "broken", "first"),  # and the first seed of the 60: a run that shows it should come soon
    [
        ("fresh", property(lambda election: not election.lost.is_set()), 0),  # however old its renewal is
        ("vouch", always, 50),  # though it may take the Lease itself
    ],
)
def test_two_masters_that_speak_at_a_time_are_noticed(
    monkeypatch: pytest.MonkeyPatch, promise: str, broken: Any, first: int
) -> None:
    monkeypatch.setattr(LeaderElection, promise, broken)
    noticed = []
    for seed in range(first, first + 60):
        try:
            World(seed, masters=2).run()
        except SimulationFailed as error:
            noticed.append(str(error))
            if re.search(r"the master of term \d+ speaks, though one has acted in", noticed[-1]):
                return
    # Workers of a master that acts for too long may also wait too long; this test is not for that.
    raise AssertionError(noticed)
