"""A thousand whole jobs under faults, each repeatable from its seed."""

from tests.simulator import World

SEEDS = 1000


def test_a_thousand_simulated_jobs_count_every_record_once() -> None:
    faults = 0
    for seed in range(SEEDS):
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"repeat with: python -m tests.simulator --seed {seed}") from error
        faults += world.faults.total()
    assert faults > SEEDS, "the simulator has hardly injected a fault"


def test_a_run_repeats_from_its_seed() -> None:
    histories = []
    for _ in range(2):
        world = World(4711)
        world.run()
        histories.append(world.history)
    assert histories[0] == histories[1]
