"""A thousand whole jobs under faults, each repeatable from its seed."""

from collections import Counter

import pytest

from master.core import completion, training
from tests.simulator.faults import KINDS, MOMENTS, RARE
from tests.simulator.world import SimulationFailed, World

SEEDS = 1000


def run(seeds: int) -> None:
    for seed in range(seeds):
        World(seed).run()


def test_a_thousand_simulated_jobs_count_every_record_once() -> None:
    faults, moments, ends = Counter[str](), Counter[str](), Counter[str]()
    losses = 0
    for seed in range(SEEDS):
        world = World(seed)
        world.run()  # a failure says the seed, how to repeat it, and what came before
        faults += world.faults.kinds
        moments += world.faults.moments
        losses += world.job.restarts
        ends[world.job.phase] += 1
    assert set(faults) == {*KINDS, *RARE}, "a kind of fault never happened"
    assert set(moments) == set(MOMENTS), "a moment was never hit"
    assert faults.total() > 3 * SEEDS, "the simulator has hardly injected a fault"
    assert losses > 20, "it has hardly happened that all state was lost"
    assert ends["Succeeded"] > 0.8 * SEEDS


def test_a_run_repeats_from_its_seed() -> None:
    histories = []
    for _ in range(2):
        world = World(4711)
        world.run()
        histories.append(world.watchdog.history)
    assert histories[0] == histories[1]


def test_a_wrong_decision_is_noticed_and_the_failure_says_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        training, "go_on_from", lambda job, step, checkpoint=False: None
    )  # the root's step is not taken over
    with pytest.raises(
        SimulationFailed, match=r"seed \d+: .*\nrepeat with: python -m tests.simulator --seed"
    ):
        run(50)


def test_a_job_that_does_not_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "export", lambda job, root: None)
    with pytest.raises(SimulationFailed, match="the job does not end: "):
        run(20)
