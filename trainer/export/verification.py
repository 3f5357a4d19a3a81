# SPDX-License-Identifier: Apache-2.0
"""Whether exports can be loaded in a process that has not trained the model, and give the same outputs.

The process is started when the end of a job is near: it imports while the last steps are trained and the
model is saved, and loads and compares while the model is evaluated. It ends with this process. A wrong file
is one finding; a lack of memory or time for the process is another, and says nothing about the file.

    begin ──▶ ask(exports) ──▶ result
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from edl.contract.own_modules import module_command
from edl.errors import EdlError
from edl.trainer.export import formats
from edl.trainer.export.samples import Sample
from edl.trainer.model.user_model import UserModel
from edl.trainer.runtime import serialization
from edl.trainer.runtime.error_report import clean, format_error

BASE_BYTES = 500 << 20  # of a process with TensorFlow and Keras
COPIES = 3  # of what is in a file, while it is loaded
MEBIBYTE = 1 << 20
CGROUP = Path("/sys/fs/cgroup")  # of a container, as it sees it itself
MOST_LOG = 1_000  # characters of what the process has written, when it dies
SLOWEST = 2_000_000  # bytes of what was exported that are loaded and run in a second where all else is slow
# The last words of a process whose memory has run out, unless the kernel has killed it.
NO_MEMORY = ("MemoryError", "bad_alloc", "ResourceExhausted", "Cannot allocate memory")
PATIENCE_SECONDS = 0.5  # between two looks whether this worker has to end
# Variables of this worker that a process that loads a model must not see.
OURS = frozenset(
    {"EDL_TOKEN", "EDL_MASTER", "EDL_WORKER_ID", "EDL_RUN_ID", "EDL_RING_INTERFACE", "TF_CONFIG"}
)


class Found(NamedTuple):
    """The result of verifying an export; empty texts where nothing is to be reported.

    Args:
        wrong: what is wrong with it.
        needs_code: why Keras cannot load it, though the module's own code can.
        unseen: why it could not be found out whether something is wrong.
    """

    wrong: str = ""
    needs_code: str = ""
    unseen: str = ""

    @property
    def verified(self) -> bool:
        """Whether it was loaded again, and is as the model in memory."""
        return not (self.wrong or self.unseen)


class Verification:
    """One fresh process that verifies exports. Its methods raise nothing: `result` reports each trouble.

    Args:
        seconds: that it may take from when it is asked, beside those that large files take.
        threads: of TensorFlow, as in this process: sums depend on it; 0: TensorFlow decides.
    """

    def __init__(self, seconds: float, threads: int = 0):
        self._seconds, self._threads = seconds, threads
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_at = self._deadline = 0.0
        self._names: list[str] = []  # of the formats that were asked for
        self.unseen = ""  # why the process cannot run, or was not asked

    def begin(self) -> None:
        """Start the process, unless it runs: it imports Keras until it is asked."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self.unseen, self._names = "", []
        with self._noting():
            refuse_without(BASE_BYTES)
            # Anonymous memory, so that a full disk does not matter.
            self._files = [os.fdopen(os.memfd_create(n), "w+b") for n in ("request", "result", "log")]
            self._request, self._result, self._log = self._files
            descriptors = self._request.fileno(), self._result.fileno()
            self._process = subprocess.Popen(
                [*module_command("edl.trainer.export.fresh"), *map(str, descriptors)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                env=environment(self._threads),
                pass_fds=descriptors,
            )

    def ask(
        self,
        sample: Sample,
        exports: Mapping[str, Path],
        module: UserModel | None = None,
        source: str = "",
    ) -> None:
        """Begin to load and compare these exports.

        Args:
            sample: of the model in memory.
            exports: by the names of their formats.
            module: builds the model, if Keras cannot load it.
            source: the text of the module, if it was given as such.
        """
        self._names, self._asked_at = list(exports), time.monotonic()
        if self._process is None:
            return
        with self._noting():
            sizes = [sum(f.stat().st_size for f in formats.files_of(path)) for path in exports.values()]
            self._deadline = self._asked_at + self._seconds + sum(sizes) / SLOWEST
            refuse_without(COPIES * max(sizes))
            request = {
                "sample": vars(sample),
                "exports": {name: str(path.resolve()) for name, path in exports.items()},
                "module": module.name if module is not None else "",
                "source": source,
                "functions": dict(module.functions) if module is not None else {},
            }
            self._request.write(serialization.encode(request))
            self._request.flush()
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has died: `result` says so
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()

    def result(self, must_end: Callable[[], bool] = lambda: False) -> dict[str, Found]:
        """Return the result for each export that was asked for, by its format, and end the process.

        Args:
            must_end: asked now and then whether the answer is not needed any more.
        """
        if not self._names:
            return {}
        try:
            found = Found(unseen=self.unseen) if self.unseen else self._answer(must_end)
        finally:
            self.close()
        return found if isinstance(found, dict) else dict.fromkeys(self._names, found)

    def _answer(self, must_end: Callable[[], bool]) -> Found | dict[str, Found]:
        """Wait for the process, and return what it has found, or what became of it."""
        assert self._process is not None
        while True:
            try:
                code = self._process.wait(PATIENCE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if must_end():
                    return Found(unseen="the job ends before the process that loads it has")
                if time.monotonic() > self._deadline:
                    took = f"{time.monotonic() - self._asked_at:,.0f} s"
                    return Found(unseen=f"the process that loads it has not ended within {took}")
        for file in (self._result, self._log):
            file.seek(0)
        if code == 0 and (answer := self._result.read()):
            return {name: Found(*found) for name, found in json.loads(answer).items()}
        if code == -signal.SIGKILL:
            return Found(
                unseen="the process that loads it was killed (SIGKILL), as happens where memory is short"
            )
        last = clean(self._log.read().decode(errors="replace").strip()[-MOST_LOG:], MOST_LOG)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        if any(word in last for word in NO_MEMORY):
            return Found(unseen=f"the process that loads it has not had enough memory ({how}): {last}")
        return Found(f"the process that loads what was exported has died ({how}): {last}")

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Inside, a lack of memory or a failing start is noted as the reason why exports are not verified."""
        try:
            yield
        except (EdlError, OSError) as error:
            self.unseen = format_error(error)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            for file in (self._process.stdin, *self._files):
                with contextlib.suppress(OSError):
                    file.close()
            self._process = None


def environment(threads: int) -> dict[str, str]:
    """The environment of a process that loads a model: without this job's variables and this worker's GPU."""
    kept = {k: v for k, v in os.environ.items() if k not in OURS and not k.startswith("HOROVOD_")}
    kept |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if threads:
        kept |= {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": "1"}
    return kept


def refuse_without(nbytes: int) -> None:
    """Refuse to use more memory than the container's limit leaves: beyond it, its processes are killed.

    Memory that the kernel can reclaim from files counts as free.

    Raises:
        EdlError: the container's limit does not leave as much.
    """
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        left = int(limit) - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):  # no limit ("max"), or not in a container
        return
    if left < nbytes:
        raise EdlError(
            f"to load the model again takes about {nbytes // MEBIBYTE:,} MiB, and the container's memory "
            f"limit leaves {max(left, 0) // MEBIBYTE:,} MiB; raise worker.resources.limits.memory, or set "
            "export.verify=false"
        )
