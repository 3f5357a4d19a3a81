# SPDX-License-Identifier: Apache-2.0
"""Run the simulator once or many times; print the errors and the number of faults."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import tests.simulator
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from tests.simulator import soak
from tests.simulator.servers import GONES, KINDS_OF_JOBS, STUCKS
from tests.simulator.world import SimulationFailed, World

MAX_WRONG = 3


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulator",
        description=tests.simulator.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs")
    parser.add_argument("--masters", type=int, choices=(1, 2), help="in all runs; else as the seed says")
    parser.add_argument(
        "--servers", choices=sorted({*KINDS_OF_JOBS, *GONES, *STUCKS}), default="", help="in all runs: a kind"
    )
    parser.add_argument("--flips", action="store_true", help="in all runs: bits of the state flip")
    parser.add_argument("--soak", type=float, metavar="HOURS", help="one job of so many hours: its memory")
    args = parser.parse_args()
    if args.soak:
        return soak.tell(args.seed, args.soak)
    faults, moments, ends = Counter[str](), Counter[str](), Counter[str]()
    losses = events = wrong = takeovers = differed = 0
    for seed in range(args.seed, args.seed + args.seeds):
        world = World(
            seed, talk=args.seeds == 1, masters=args.masters, servers=args.servers, flips=args.flips
        )
        try:
            world.run()
        except SimulationFailed as failure:
            print(failure, file=sys.stderr)
            wrong += 1
            if wrong == MAX_WRONG:
                break
            continue
        faults += world.faults.kinds
        moments += world.faults.moments
        losses += world.job.restarts
        events += len(world.watchdog.history)
        ends[world.job.phase] += 1
        takeovers += world.takeovers
        told = (e for _, _, effects in world.watchdog.history for e in effects)
        differed += sum(isinstance(e, ef.Notice) and e.reason is Reason.ReplicaDivergence for e in told)
    print(f"{args.seeds} runs, {events} events, {faults.total()} faults: {dict(faults.most_common())}")
    print(
        f"at {dict(moments.most_common())}; {takeovers} times another master took over; "
        f"all state lost {losses} times; states differed {differed} times; ended {dict(ends)}; {wrong} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
