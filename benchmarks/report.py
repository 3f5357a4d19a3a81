# SPDX-License-Identifier: Apache-2.0
"""What every benchmark has in common: rows with a median and a spread, a table, a command line."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recorder import Recorder

ROUNDS, QUICK = 5, 2


@dataclass
class Row:
    """One line of the result. Lower is better in `ours` and `peer`."""

    name: str
    ours: list[float]
    peer: list[float]
    unit: str
    goal: str
    met: bool | None = None

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "ratio": self.ratio}

    @property
    def ratio(self) -> float | None:
        if not self.ours or not self.peer or not statistics.median(self.peer):
            return None
        return statistics.median(self.ours) / statistics.median(self.peer)


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1) + 0.5)]


def spread(values: list[float]) -> str:
    """The median, and the smallest and the largest."""
    if not values:
        return "-"
    return f"{statistics.median(values):.3g} ({min(values):.3g}..{max(values):.3g})"


def table(rows: list[Row]) -> str:
    lines = [
        "| row | ours: median (spread) | peer: median (spread) | ratio | goal | met |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratio = f"{row.ratio:.3f}" if row.ratio is not None else "-"
        met = {True: "yes", False: "NO", None: ""}[row.met]
        ours, peer = f"{spread(row.ours)} {row.unit}", f"{spread(row.peer)} {row.unit if row.peer else ''}"
        lines.append(f"| {row.name} | {ours} | {peer} | {ratio} | {row.goal} | {met} |")
    return "\n".join(lines)


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def main(
    program: str,
    description: str | None,
    parts: Sequence[str],
    measure: Callable[[list[str], int], Iterable[list[Row]]],
) -> int:
    """Run a benchmark's command line.

    Args:
        parts: what `--only` may name.
        measure: takes the parts to measure and the number of rounds; gives rows as they are ready.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} rounds instead of {ROUNDS}")
    parser.add_argument("--rounds", "--pairs", type=int, help="how often each row is measured")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--record", default="", metavar="NAME", help="write benchmarks/records/DATE-NAME/")
    parser.add_argument(
        "--only", nargs="+", choices=parts, default=list(parts), metavar="ROW", help=" ".join(parts)
    )
    args = parser.parse_args()
    rounds = args.rounds or (QUICK if args.quick else ROUNDS)
    recorder = Recorder(args.record)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the `with`s: nothing is left behind
    rows: list[Row] = []
    for found in measure(args.only, rounds):
        # Each part as it is ready: an interrupted run has shown what it measured.
        print("\n".join(table(found).splitlines()[2 if rows else 0 :]), flush=True)
        rows += found
        recorder.write({"rounds": rounds, "rows": [row.as_json() for row in rows]})
    if args.json:
        content = {"rounds": rounds, "rows": [row.as_json() for row in rows]}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0
