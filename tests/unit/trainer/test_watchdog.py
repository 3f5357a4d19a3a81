# SPDX-License-Identifier: Apache-2.0
"""Limits on the time of the user's code: `edl.trainer.runtime.watchdog`, with threads and a process."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
from queue import SimpleQueue

import pytest

from edl.contract.exit_codes import WorkerExit
from edl.trainer.runtime import watchdog as watchdog_module
from edl.trainer.runtime.watchdog import STARTUP_TIMEOUT, STEP_TIMEOUT, Compute, Limit, Watchdog

SECONDS = 20.0
LIMIT = 0.05


class Called(threading.Thread):
    """A call that returns on request, on a thread of its own."""

    def __init__(self, watchdog: Watchdog, name: str, waits: bool = False):
        super().__init__(daemon=True)
        self._compute = Compute(watchdog, LIMIT, 0.0, lambda: waits)
        self._what, self._inside, self.ends = name, threading.Event(), threading.Event()
        self.start()
        assert self._inside.wait(SECONDS)

    def run(self) -> None:
        with self._compute("step", lambda: self._what, 1):
            self._inside.set()
            self.ends.wait(SECONDS)


def test_who_waits_for_others_is_not_blamed_and_who_hangs_is_with_its_stack() -> None:
    told = SimpleQueue[tuple[str, str]]()
    watchdog = Watchdog(LIMIT, lambda why, stack: told.put((why, stack)))
    calls = [Called(watchdog, "step 1", waits=True), Called(watchdog, "step 2")]
    why, stack = told.get(timeout=SECONDS)
    values = "elastic.stepTimeoutSeconds + elastic.startupTimeoutSeconds"  # it may be compiled for one record
    assert why == f"step 2 has not returned for 0.05 s ({values})"
    assert "self.ends.wait(SECONDS)" in stack
    for call in calls:
        call.ends.set()


def test_calls_may_be_nested_and_each_has_its_own_limit() -> None:
    told = SimpleQueue[str]()
    watchdog = Watchdog(SECONDS, lambda why, stack: told.put(f"another: {why}"))
    mine = SimpleQueue[str]()
    with (
        watchdog.watch(lambda: "outer"),
        watchdog.watch(lambda: "inner", Limit(LIMIT, "a.value", hung=lambda why, stack: mine.put(why))),
    ):
        assert mine.get(timeout=SECONDS) == "inner has not returned for 0.05 s (a.value)"
    assert told.empty()


def test_only_the_first_step_with_a_number_of_records_may_take_longer_than_a_step() -> None:
    """So code that hangs in its backward pass is found after elastic.stepTimeoutSeconds, unless the worker
    has never computed so many records: then elastic.startupTimeoutSeconds come on top."""
    compute = Compute(Watchdog(SECONDS, lambda why, stack: None), 600.0, 180.0)

    def limit(kind: str, records: int) -> tuple[float, str]:
        with compute(kind, lambda: "a step", records) as call:
            return call.limit.seconds, call.limit.setting

    first, later = (780.0, f"{STEP_TIMEOUT} + {STARTUP_TIMEOUT}"), (600.0, STEP_TIMEOUT)
    assert [limit("step", 32), limit("step", 32)] == [first, later]
    assert [limit("step", 31), limit("evaluation", 32), limit("step", 32)] == [first, first, later]
    with pytest.raises(RuntimeError), compute("step", lambda: "a step", 16):
        raise RuntimeError("the ring broke while the model was compiled")
    assert [limit("step", 16), limit("step", 16)] == [first, later]


def test_a_step_of_a_known_size_that_hangs_is_told_by_the_limit_of_a_step() -> None:
    told = SimpleQueue[str]()
    compute = Compute(Watchdog(LIMIT, lambda why, stack: told.put(why)), LIMIT, SECONDS)
    with compute("step", lambda: "step 1", 32):
        pass
    with compute("step", lambda: "step 2", 32):
        assert told.get(timeout=SECONDS) == "step 2 has not returned for 0.05 s (elastic.stepTimeoutSeconds)"


def test_a_native_computation_that_does_not_return_is_named_by_the_times_before_it_and_then_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python cannot interrupt it; other threads run meanwhile, as with any kernel of TensorFlow's."""
    told = SimpleQueue[str]()
    watchdog = Watchdog(SECONDS, lambda why, stack: told.put(f"hung: {why}, {'pbkdf2' in stack}"))
    compute = Compute(watchdog, 10 * LIMIT, SECONDS, warn=told.put)

    def kernel() -> None:
        with compute("step", lambda: "step 3", 32):
            hashlib.pbkdf2_hmac("sha256", b"", b"", 5_000_000)

    for _ in range(2):
        with compute("step", lambda: "a step", 32):
            pass
    assert told.empty()
    monkeypatch.setattr(watchdog_module, "SLOW_SECONDS", LIMIT)
    threading.Thread(target=kernel, daemon=True).start()
    named, ended = told.get(timeout=SECONDS), told.get(timeout=SECONDS)
    assert re.fullmatch(
        r"step 3 has not returned for \d+ s; the longest one so far took \S+ s\. If it does not return, this "
        r"worker ends after 0\.5 s \(elastic\.stepTimeoutSeconds\)\. The stack is in its log",
        named,
    )
    assert ended == "hung: step 3 has not returned for 0.5 s (elastic.stepTimeoutSeconds), True"


CLOSES = """
import os
from edl.trainer.runtime.watchdog import Watchdog
watchdog = Watchdog(60.0, lambda why, stack: None)
with watchdog.watch(lambda: "mine.py: feed()"):
    os.closerange(3, 1000)
"""


def test_a_call_that_closes_descriptors_of_the_worker_ends_it_with_a_code_that_says_so() -> None:
    ended = subprocess.run([sys.executable, "-c", CLOSES], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == WorkerExit.DESCRIPTORS_CLOSED
    assert ended.stderr == "mine.py: feed() has closed file descriptors of its worker\n"
