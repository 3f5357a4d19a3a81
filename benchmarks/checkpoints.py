# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench checkpoints`: what a checkpoint costs beyond its bytes. `--quick`: two rounds.

The peer is a plain file in the same round: written in pieces and fsynced, or read into memory; once as it is,
once with SHA-256 in the same pass. `cold`: the file was dropped from the kernel's cache before.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edl.checkpoints import Checkpoint, Store, Tensor
from edl.checkpoints.tensors import PIECE
from tests.support.checkpoints.checkpoints import write

VARIABLES = 60  # in the state, a third of them the weights, as with Adam


@dataclass(frozen=True)
class Timing:
    """Seconds that have passed, and seconds of CPU, which other processes on the machine change less."""

    seconds: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--dir", type=Path, default=None, help="on which disk; default: that of $TMPDIR")
    options = parser.parse_args()
    count = options.mb * 1_000_000 // VARIABLES // 4
    random = np.random.default_rng(7)
    state = {f"v{n}": Tensor.of(random.random(count, np.float32)) for n in range(VARIABLES)}
    nbytes = sum(len(tensor.data) for tensor in state.values())
    taken: dict[str, list[Timing]] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for number in range(1, 1 + (2 if options.quick else options.rounds)):
            for name, took in _round(Path(directory), state, number).items():
                taken.setdefault(name, []).append(took)
    print(f"{nbytes / 1e6:,.0f} MB in {VARIABLES} variables; median (minimum - maximum)")
    print(f"{'':34} {'MB/s':>20}   seconds of CPU")
    for name, times in taken.items():
        rates = sorted(nbytes / 1e6 / t.seconds for t in times)
        rate = f"{statistics.median(rates):,.0f} ({rates[0]:,.0f} - {rates[-1]:,.0f})"
        cpu = sorted(t.cpu for t in times)
        print(f"{name:34} {rate:>20}   {statistics.median(cpu):.2f} ({cpu[0]:.2f} - {cpu[-1]:.2f})")


def _round(directory: Path, state: dict[str, Tensor], number: int) -> dict[str, Timing]:
    """What each measurement has taken."""
    plain = directory / "plain"
    store = Store.open(str(directory / "checkpoints"))
    made: dict[int, Checkpoint] = {}

    def keep(parts: int) -> None:
        made[parts] = write(store, 2 * number + parts, tensors=state, parts=parts)

    found = {
        "write: plain": _timed(lambda: write_plain(plain, state, hashed=False)),
        "write: plain, SHA-256": _timed(lambda: write_plain(plain, state, hashed=True)),
        "write: checkpoint": _timed(lambda: keep(1)),
        "write: checkpoint, 2 parts in turn": _timed(lambda: keep(2)),
        "read: plain": _timed(lambda: read_plain(plain, hashed=False)),
        "read: plain, SHA-256": _timed(lambda: read_plain(plain, hashed=True)),
        "read: checkpoint": _timed(made[1].read),
        "read: checkpoint of 2 parts": _timed(made[2].read),
    }
    _forget(plain)
    found["read: plain, cold"] = _timed(lambda: read_plain(plain, hashed=False))
    for parts, checkpoint in made.items():
        for name in checkpoint.files:
            _forget(directory / "checkpoints" / checkpoint.directory / name)
        of = "" if parts == 1 else f" of {parts} parts"
        found[f"read: checkpoint{of}, cold"] = _timed(checkpoint.read)
    store.prune(1)
    return found


def _timed(do: Callable[[], object]) -> Timing:
    began, cpu = time.perf_counter(), time.process_time()
    do()
    return Timing(time.perf_counter() - began, time.process_time() - cpu)


def write_plain(path: Path, state: dict[str, Tensor], hashed: bool) -> None:
    path.unlink(missing_ok=True)
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        for tensor in state.values():
            for start in range(0, len(tensor.data), PIECE):
                piece = tensor.data[start : start + PIECE]
                if hashed:
                    digest.update(piece)
                file.write(piece)
        os.fsync(file.fileno())


def read_plain(path: Path, hashed: bool) -> None:
    room = memoryview(bytearray(path.stat().st_size))
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(room[:PIECE]):
            if hashed:
                digest.update(room[:count])
            room = room[count:]


def _forget(path: Path) -> None:
    """Drop the file from the kernel's cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
