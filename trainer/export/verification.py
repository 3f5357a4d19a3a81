# SPDX-License-Identifier: Apache-2.0
"""Whether what was exported can be loaded, in a process that has not trained it, and gives the same outputs.

The process is started as soon as the end of a job begins: it imports while the model is saved, and loads and
compares while the model is evaluated. It ends with this process. That it finds something wrong with a file is
one thing; that it cannot look, for want of memory or of time, is another, and says nothing of the file.

    begin ──▶ ask(exports) ──▶ result
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras

from edl.contract.own_modules import module_command
from edl.errors import EdlError
from edl.trainer.export import formats, room, samples
from edl.trainer.runtime.error_report import clean

BASE_BYTES = 500 << 20  # of a process with TensorFlow and Keras
COPIES = 3  # of what is in a file, while it is loaded
MOST_LOG = 1_000  # characters of what the process has written, when it dies
SLOWEST = 2_000_000  # bytes of what was exported that are loaded and run in a second where all else is slow
# What a process says last whose memory has run out, beside being killed by the kernel.
NO_MEMORY = ("MemoryError", "bad_alloc", "ResourceExhausted", "Cannot allocate memory")
PATIENCE_SECONDS = 0.5  # between two looks whether this worker has to end
# Variables of this worker that a process that loads a model must not see.
OURS = frozenset(
    {"EDL_TOKEN", "EDL_MASTER", "EDL_WORKER_ID", "EDL_RUN_ID", "EDL_RING_INTERFACE", "TF_CONFIG"}
)


class Found(NamedTuple):
    """The result of verifying an export.

    Args:
        wrong: with it; empty: nothing.
        needs_code: why Keras cannot load it, though the module's own code can; empty: it can.
        unseen: why it could not be found out whether something is wrong; empty: it was.
    """

    wrong: str = ""
    needs_code: str = ""
    unseen: str = ""


class Verification:
    """One fresh process that verifies exports.

    Args:
        seconds: that it may take from when it is asked, beside those that large files take.
        threads: of TensorFlow, as in this process: sums depend on it; 0: TensorFlow decides.

    Raises:
        EdlError: there is no memory for it.
        OSError: it cannot be begun.
    """

    def __init__(self, seconds: float, threads: int = 0):
        room.refuse_without(BASE_BYTES)
        self._seconds = seconds
        self._request, self._result, self._log = (
            os.memfd_create(f"edl-{name}") for name in ("request", "result", "log")
        )
        self._asked_at = 0.0
        self._names: list[str] = []
        self._process = subprocess.Popen(
            [*module_command("edl.trainer.export.fresh"), str(self._request), str(self._result)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=environment(threads),
            pass_fds=(self._request, self._result),
        )

    def ask(
        self,
        model: keras.Model,
        sample: samples.Sample,
        exports: Mapping[str, Path],
        module: str = "",
        source: str = "",
        functions: Mapping[str, str] | None = None,
    ) -> None:
        """Begin to load and compare these exports.

        Args:
            model: as it is in memory.
            exports: by the names of their formats.
            module, source, functions: the user's module, as in the job's values.

        Raises:
            EdlError: there is no memory for another copy of the model.
        """
        sizes = [sum(f.stat().st_size for f in formats.files_of(path)) for path in exports.values()]
        room.refuse_without(COPIES * max(sizes))
        self._seconds += sum(sizes) / SLOWEST
        about: dict[str, Any] = {
            "exports": {name: str(path.resolve()) for name, path in exports.items()},
            "inputs": [] if sample.features is None else formats.input_names(model, sample.features),
            "module": module,
            "source": source,
            "functions": {**(functions or {})},
        }
        with open(os.dup(self._request), "wb") as file:
            file.write(samples.packed(sample, about))
        self._names, self._asked_at = list(exports), time.monotonic()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: `result` says so
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def result(self, must_end: Callable[[], bool] = lambda: False) -> dict[str, Found]:
        """Return the result for each export, by its format.

        Args:
            must_end: asked now and then whether the answer is not needed any more.
        """
        deadline = self._asked_at + self._seconds
        while True:
            try:
                code = self._process.wait(PATIENCE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if must_end():
                    return self._unseen("the job ends before the process that loads it has")
                if time.monotonic() > deadline:
                    took = f"{time.monotonic() - self._asked_at:,.0f} s"
                    return self._unseen(f"the process that loads it has not ended within {took}")
        text, log = _content(self._result), _content(self._log)
        if code == 0 and text:
            self.close()
            return {name: Found(*found) for name, found in json.loads(text).items()}
        if code == -signal.SIGKILL:
            return self._unseen(
                "the process that loads it was killed (SIGKILL), as happens where memory is short"
            )
        last = clean(log.strip()[-MOST_LOG:], MOST_LOG)
        if any(word in last for word in NO_MEMORY):
            return self._unseen(f"the process that loads it has not had enough memory ({_how(code)}): {last}")
        self.close()
        why = f"the process that loads what was exported has died ({_how(code)}): {last}"
        return dict.fromkeys(self._names, Found(why))

    def _unseen(self, why: str) -> dict[str, Found]:
        self.close()
        return dict.fromkeys(self._names, Found(unseen=why))

    @property
    def lives(self) -> bool:
        """Whether the verifying process still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process: it is not needed any more."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        for descriptor in (self._request, self._result, self._log):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._request = self._result = self._log = -1


class Ahead:
    """A process that is begun before the end, when that is near: its imports take as long as the last steps.

    Args:
        begin: begins one.
    """

    def __init__(self, begin: Callable[[], Verification]):
        self._begin = begin
        self._begun: Verification | None = None

    def prepare(self) -> None:
        """Start the process now, so that it has imported Keras when a model is to be verified."""
        if self._begun is None:
            with contextlib.suppress(OSError, EdlError):  # no memory, no room: `take` tries again
                self._begun = self._begin()

    def take(self) -> Verification:
        """The process, which is waited for from now on.

        Raises:
            EdlError, OSError: it cannot be begun.
        """
        begun, self._begun = self._begun, None
        if begun is not None and begun.lives:
            return begun
        return self._begin()


def environment(threads: int) -> dict[str, str]:
    """The environment of a process that loads a model: without this job's variables and this worker's GPU."""
    ours = {name for name in os.environ if name in OURS or name.startswith("HOROVOD_")}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    more = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if threads:
        more |= {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": "1"}
    return kept | more


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _content(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(os.dup(descriptor), encoding="utf-8", errors="replace") as file:
        return file.read()
