# SPDX-License-Identifier: Apache-2.0
"""Measure a training step on the GPU: the trainer's own loop in a ring of one, in turns with `keras.fit`.

steps.py PRECISION ROUNDS STEPS

PRECISION is float32 or mixed_float16. In each round both sides train STEPS steps, one side after the other.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

BATCH = 1024


def side(which: str, precision: str) -> None:
    """Train with "edl" or "fit": print "warm", then a step's seconds for each number of steps on stdin."""
    import keras
    import numpy as np

    from benchmarks import steady

    class Timing(steady.Timing):
        """Times many steps as one, from the first one's begin to the last one's end; a GPU works behind."""

        def __init__(self) -> None:
            super().__init__()
            self._first: float | None = None

        def begins(self) -> None:
            if self._first is None:
                self._first = time.perf_counter()
                self._cpu = time.process_time()

        def ends(self) -> None:
            self._seconds.append(0)
            if len(self._seconds) < self._many:
                return
            assert self._first is not None
            seconds, cpu = time.perf_counter() - self._first, time.process_time() - self._cpu
            if not self._warm:
                self._warm = True
                print("warm", flush=True)
            else:
                print(seconds / len(self._seconds), cpu / len(self._seconds), flush=True)
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            self._many, self._seconds, self._first = int(line), [], None

    steady.Timing = Timing
    keras.mixed_precision.set_global_policy(precision)
    model = steady.Model(steady.mlp(2048, 4096, 3072, 1024), (2048,), BATCH)
    random = np.random.default_rng(0)
    x = random.normal(size=(4 * BATCH, *model.shape)).astype("f4")
    y = random.integers(0, 10, 4 * BATCH)
    keras.utils.set_random_seed(1)
    built = model.build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(keras.optimizers.Adam(1e-5), loss, jit_compile=False)
    if which == "fit":
        steady.fit(built, model, x, y)
    else:
        ring = steady.HorovodRing(9, "lo", "edl-0")  # a ring of one does not connect to its store
        steady.ours(built, model, ring, 0, 1, x, y)


def main(precision: str, rounds: int, steps: int) -> int:
    sides, errors = {}, {}
    for which in ("edl", "fit"):
        errors[which] = tempfile.TemporaryFile("w+", encoding="utf-8")
        sides[which] = subprocess.Popen(
            [sys.executable, __file__, "--side", which, precision],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors[which],
            text=True,
        )
    try:
        for which, process in sides.items():
            while "warm" not in (line := process.stdout.readline()):
                if not line:
                    errors[which].seek(0)
                    print(which, "ended before it was warm:", errors[which].read()[-700:])
                    return 1
        found: dict[str, list[tuple[float, float]]] = {which: [] for which in sides}
        for _ in range(rounds):
            for which, process in sides.items():
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
                seconds, cpu = map(float, process.stdout.readline().split())
                found[which].append((1e3 * seconds, 1e3 * cpu))
    finally:
        for process in sides.values():
            process.kill()
    for which, values in found.items():
        wall, cpu = zip(*values, strict=True)
        print(
            f"{precision} batch {BATCH} {which}: median {statistics.median(wall):.2f} ms a step "
            f"({min(wall):.2f}..{max(wall):.2f}), {statistics.median(cpu):.2f} ms of CPU"
        )
    ratios = [fit[0] / edl[0] for edl, fit in zip(found["edl"], found["fit"], strict=True)]
    print(f"keras.fit takes {statistics.median(ratios):.2f} times as long: {[round(r, 2) for r in ratios]}")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--side":
        side(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
