# SPDX-License-Identifier: Apache-2.0
"""A worker that runs a user's script: the script calls `edl.join`, which makes it a worker of the job.

    run the script ─▶ edl.join ─▶ job.steps: the first turns ─▶ report ready ─▶ train on a thread
                                                                                 │ the master's orders
    the worker that saves: the loop ends ─▶ the rest of the script ─▶ report the result ─▶ the end

The script runs on the main thread, so it has all that a program has: its arguments, signals, `__main__`. The
worker's own loop runs on a thread (trainer/step/turns.py). A worker that does not save ends within
`job.steps()`: what follows the loop runs once in a job.
"""

from __future__ import annotations

import os
import random
import runpy
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from edl import scratch
from edl.config import Config
from edl.contract import artifacts, script_imports
from edl.contract.proto import edl_pb2 as pb
from edl.errors import ModelError, UserCodeError
from edl.trainer import join, loop
from edl.trainer.agreement.metric_values import Value
from edl.trainer.callbacks.history import MAX_TOLD, HistoryFiles, as_json
from edl.trainer.checkpoint.checkpointing import of_job
from edl.trainer.parts.part import LoopPart
from edl.trainer.parts.restore import Restore
from edl.trainer.records.batches import Batches, Wait
from edl.trainer.ring import gloo
from edl.trainer.ring.base import Ring, RingSlot
from edl.trainer.runtime.gpu_memory import set_gpu_memory, set_threads
from edl.trainer.runtime.keras_import import import_leading
from edl.trainer.runtime.watchdog import Watch
from edl.trainer.session.client import MasterStream
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.start.assembly import assemble
from edl.trainer.start.startup import Begun, begin, ring_of
from edl.trainer.state import State
from edl.trainer.step.loop_learner import LoopLearner
from edl.trainer.step.loop_stop import LoopStop
from edl.trainer.worker import Worker


def run(script: str, arguments: Sequence[str]) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` does, in this process.

    A script with relative imports runs as `python -m` runs it.

    Args:
        script: the path of a Python file, or its text (it has more than one line then).

    Raises:
        ModelError: there is no such file.
        UserCodeError: the script has called sys.exit with a failure.
        Exception: raised by the script.
    """
    path = Path(script)
    if "\n" in script:
        # The run's own text, as the master has sent it: a volume could show a later one to a later worker.
        path = scratch.of_this_process() / "model_script.py"
        path.write_text(script, encoding="utf-8")
    elif not path.is_file():
        raise ModelError(f"model.script: there is no file {path}")
    sys.argv = [str(path), *arguments]
    folder = path.parent.resolve()
    sys.path.insert(0, str(folder))
    try:
        if "\n" not in script and (depth := script_imports.relative_depth(path)):
            root = folder.parents[depth - 1]
            while (root / "__init__.py").is_file():
                root = root.parent
            sys.path.insert(0, str(root))
            name = ".".join([*folder.relative_to(root).parts, path.stem])
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            given = f" with the arguments `{shlex.join(arguments)}`; options of edl come before --script"
            raise UserCodeError(
                f"{path.name} has called sys.exit({error.code!r})" + given * bool(arguments)
            ) from error


class _Comparison(LoopPart):
    """Compares the workers' states in the first steps of each ring, when some may have received theirs."""

    def __init__(self, learner: LoopLearner):
        self._learner = learner

    def ring_up(self, here: RingSlot) -> None:
        self._learner.compare_first_steps()


class Served:
    """The host of a loop that is a worker of a job (`loop.Host`).

    Args:
        ready: reports to the master that this worker can join a ring.
        ended: ends this process after the master's last order.
    """

    def __init__(
        self,
        begun: Begun,
        ready: Callable[[Worker], None],
        ended: Callable[[Worker], None],
    ):
        self.config: Config = begun.config
        self._engine = ring_of(begun.stream, gloo.GlooRing)
        self.ring: Ring = self._engine
        self.watch: Watch = begun.watchdog.watch
        self.wait: Wait = begun.session.waiting.result
        self.job: loop.Job | None = None
        self._begun, self._ready, self._ended = begun, ready, ended
        self._saved = threading.Event()  # the script is over

    @property
    def output(self) -> Path:
        """The directory for the script's own files."""
        return self._begun.results or Path.cwd()

    @property
    def tries_whole(self) -> bool:
        """True on one worker, for all."""
        return self._begun.stream.runs_preflight

    def train(self, job: loop.Job, learner: LoopLearner, batches: Batches) -> None:
        """Train in the job's rings until the training ends."""
        begun, config, session, ring = self._begun, self.config, self._begun.session, self._engine
        if not config.is_decided:
            session.say(built=pb.Built(tables=0))
        history = HistoryFiles(begun.results)
        state = State(learner, batches.steps, begun.compute(lambda: ring.waits))

        def export(final_metrics: Mapping[str, Value] | None) -> None:
            told = state.ledger.epochs.history
            history.end(told)
            session.say(history=pb.History(json=as_json(told[-MAX_TOLD:])))
            job.turns.end()
            self._saved.wait()
            # In answer to each order: the master that gave the last one may have died.
            session.say_finished(pb.Finished(model=self._saved_model()))

        restore = Restore(state, of_job(config, session, learner, begun.stream.run_id))
        report = Telemetry(session, batches.steps, has_loss=learner.has_loss)
        worker = assemble(
            config,
            session,
            ring,
            state,
            batches,
            report,
            restore,
            export,
            callbacks=LoopStop(lambda: job.asks_stop or learner.is_stopped),
            history=history,
            more=[_Comparison(learner)],
        )
        self._ready(worker)
        self._ended(worker)

    def over(self) -> None:
        """The script has ended: report that, and wait for the end of this process.

        Raises:
            ModelError: it has ended too early.
        """
        if self.job is None:
            raise ModelError(f"{self.config.model.name}: the script has ended, and never called edl.join()")
        if early := self.job.left_early:
            raise ModelError(f"{early}; in a job it must go on until job.steps() ends")
        self._saved.set()
        self.job.wait()  # its thread ends this process

    def _saved_model(self) -> str:
        """The file that the summary names as the model: Keras' own, if the script has saved one."""
        results, output = self._begun.results, self._begun.output
        if results is None or not (found := results / artifacts.MODEL).exists():
            return ""
        return str(found.relative_to(output or results))


def _import_and_seed(config: Config) -> None:
    """Import what the script imports first, and set the seeds of its random numbers.

    TensorFlow gets its limit of a GPU's memory before its first operation. Keras draws its seeds from
    Python's random numbers; `keras.utils.set_random_seed` would import TensorFlow on every backend.
    """
    if config.worker.gpu_memory == "growth":  # for a script that imports TensorFlow later
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    import_leading(script_imports.leading_imports(config.model.script))
    seed, found = config.training.seed, sys.modules
    random.seed(seed)
    np.random.seed(seed)
    if "tensorflow" in found:
        set_gpu_memory(config.worker.gpu_memory)
        if config.training.deterministic:
            set_threads(config.local.threads, deterministic=True)
        found["tensorflow"].random.set_seed(seed)
    if "torch" in found:
        found["torch"].manual_seed(seed)


def work(
    stream: MasterStream,
    ready: Callable[[Worker], None],
    ended: Callable[[Worker], None],
) -> None:
    """Run the script of the job that this worker belongs to. Does not return: `ended` ends the process.

    Raises:
        Exception: the script has failed, or it has ended before the job.
    """
    begun = begin(stream)
    model = begun.config.model
    begun.doing.now(f"{model.name}: the script, until its first two steps are made")
    gloo.library()  # a Horovod without it is reported before the script runs
    _import_and_seed(begun.config)
    start = ExitStack()
    start.enter_context(begun.starting())

    def is_ready(worker: Worker) -> None:
        start.close()
        ready(worker)

    join.host = served = Served(begun, is_ready, ended)
    run(model.script, model.arguments)
    served.over()
