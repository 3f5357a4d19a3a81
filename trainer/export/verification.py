# SPDX-License-Identifier: Apache-2.0
"""Whether exports can be loaded in a process that has not trained the model, and give the same outputs.

The process that imports Keras for this is started when the end of a job is near: it imports while the last
steps are trained and the model is saved. For each export a process is forked from it, as for readers of the
data (trainer/records/processes.py), which loads and compares the export (trainer/export/fresh.py) while the
model is evaluated. All of them end with this process. A wrong file is one finding; a lack of memory or time
for the process is another, and says nothing about the file.

    begin ──▶ ask(exports) ──▶ result
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from edl.contract.exports import VERIFIER_BYTES, VERIFIER_COPIES
from edl.errors import EdlError
from edl.trainer.export import formats
from edl.trainer.export.samples import Sample
from edl.trainer.model.user_model import UserModel
from edl.trainer.records.processes import NO_GPU, ForkServer, ReaderDied
from edl.trainer.runtime.error_report import format_error
from edl.trainer.runtime.watchdog import STARTUP_TIMEOUT

MEBIBYTE = 1 << 20
CGROUP = Path("/sys/fs/cgroup")  # of a container, as it sees it itself
SLOWEST = 2_000_000  # bytes of what was exported that are loaded and run in a second where all else is slow
PATIENCE_SECONDS = 0.5  # between two looks whether this worker has to end
VERIFIER = "edl.trainer.export.fresh:Verifier"


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
    """Fresh processes that verify exports. Its methods raise nothing: `result` reports each trouble.

    Args:
        seconds: that the verification of an export may take, beside those that a large file takes.
        threads: of TensorFlow, as in this process: sums depend on it; 0: TensorFlow decides.
    """

    def __init__(self, seconds: float, threads: int = 0):
        self._seconds = seconds
        self._environment = {**NO_GPU, "TF_CPP_MIN_LOG_LEVEL": "2"}
        if threads:
            count = {"TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": "1"}
            self._environment |= count
        self._server: ForkServer | None = None
        self._asked: dict[str, Future[Found]] = {}
        self.unseen = ""  # why no process can run

    def begin(self) -> None:
        """Start the process, unless it runs: it imports Keras until it is asked."""
        self.unseen, self._asked = "", {}
        try:
            if self._server is None:
                refuse_without(VERIFIER_BYTES)
                what = "processes that load exports"
                self._server = ForkServer(
                    VERIFIER, {}, self._seconds, STARTUP_TIMEOUT, what, self._environment
                )
            self._server.start()
        except (EdlError, OSError) as error:
            self.unseen = format_error(error)

    def ask(
        self, sample: Sample, exports: Mapping[str, Path], module: UserModel | None = None, source: str = ""
    ) -> None:
        """Begin to load and compare these exports, one after the other.

        Args:
            sample: of the model in memory.
            exports: by the names of their formats.
            module: builds the model, if Keras cannot load it.
            source: the text of the module, if it was given as such.
        """
        about = None
        if module is not None:
            about = {"name": module.name, "source": source, "functions": dict(module.functions)}
        executor = ThreadPoolExecutor(1, thread_name_prefix="verification")
        self._asked = {
            name: executor.submit(self._look, name, path.resolve(), sample, about)
            for name, path in exports.items()
        }
        executor.shutdown(wait=False)

    def _look(self, name: str, path: Path, sample: Sample, module: Mapping[str, Any] | None) -> Found:
        """Let a new process load and compare an export."""
        if self.unseen:
            return Found(unseen=self.unseen)
        try:
            assert self._server is not None, "begin() comes first"
            nbytes = sum(file.stat().st_size for file in formats.files_of(path))
            refuse_without(VERIFIER_COPIES * nbytes)
            process = self._server.reader()
            try:
                seconds = self._seconds + nbytes / SLOWEST
                found: Found = process.call(
                    "look", (name, path, sample, module), (), seconds, STARTUP_TIMEOUT
                ).unpack()
            finally:
                process.close()
            return found
        except ReaderDied as death:
            return Found(unseen=f"the process that loads it {death.how}")
        except (EdlError, OSError) as error:
            return Found(unseen=format_error(error))
        except Exception as error:  # of the process: it had too little memory, for example
            return Found(unseen=f"the process that loads it has failed: {format_error(error)}")

    def result(self, must_end: Callable[[], bool] = lambda: False) -> dict[str, Found]:
        """Return the result for each export that was asked for, by its format, and end the process.

        Args:
            must_end: asked now and then whether the answer is not needed any more.
        """
        while wait(self._asked.values(), PATIENCE_SECONDS).not_done and not must_end():
            pass
        late = Found(unseen="the job ends before the process that loads it has")
        found = {name: future.result() if future.done() else late for name, future in self._asked.items()}
        self.close()
        return found

    def close(self) -> None:
        """End the process."""
        if self._server is not None:
            self._server.close()
            self._server = None


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
