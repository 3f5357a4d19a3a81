# SPDX-License-Identifier: Apache-2.0
"""A user's own training loop: the job that `edl.join` returns, and its steps.

    for step in job.steps():                  # from here on, workers may come and go
        ...
        if (mean := step.mean(gradients)) is None:
            continue                          # the step did not happen, and comes again
        ...

`job.steps()` first lets the loop run a few times with a few records, before this worker takes part in
anything. In the first turn `mean` returns None, so a loop that does not expect that fails at its start. In
the second turn it returns the gradients themselves, so that all is traced and compiled. On one worker, two
further turns show whether `state` holds all that the loop changes. Then the state is restored.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edl import scratch
from edl.config import Config
from edl.contract import artifacts
from edl.data import dataset
from edl.data.nest import map_leaves
from edl.errors import DataError, ModelError
from edl.trainer.agreement.exact_sums import BLOCKS
from edl.trainer.model import tensors
from edl.trainer.model.loop_state import LoopState
from edl.trainer.records.batches import Batches, Wait
from edl.trainer.records.records import Records
from edl.trainer.ring.base import Ring
from edl.trainer.runtime.error_report import caller
from edl.trainer.runtime.watchdog import Watch
from edl.trainer.step.loop_blocks import BlockLoopLearner, settle_libraries
from edl.trainer.step.loop_learner import STOP, Gradients, LoopLearner
from edl.trainer.step.loop_trial import LoopTrial
from edl.trainer.step.turns import LoopLeft, Turn, Turns

MEBIBYTE = 1 << 20
SAMPLE = 5  # records of the loop's first turns
Save = Callable[[Path], object]


class Host(Protocol):
    """The process in which a loop runs: `join.Alone`, or `script.Served` for a worker of a job."""

    config: Config
    ring: Ring
    watch: Watch
    wait: Wait  # for records
    job: Job | None  # that the script has joined

    @property
    def tries_whole(self) -> bool:
        """Whether the loop's trial compares two steps from the same state, for all workers of the job."""
        ...

    def train(self, job: Job, learner: LoopLearner, batches: Batches) -> None:
        """Train until the job ends; called on a thread of its own.

        It calls `Turns.end` when all steps are made and this worker is the one that saves.
        """
        ...

    @property
    def output(self) -> Path:
        """The directory of the job's results."""
        ...


class Job:
    """The job of this process. Made by `edl.join`."""

    def __init__(self, host: Host, data: Any, state: Any):
        self._host, self._where = host, caller()
        config = host.config
        try:
            reader = dataset(data, source="edl.join(data=...)")
            self.records = tensors.records(data)
            self._state = LoopState(state)
        except (DataError, ModelError) as error:
            raise type(error)(f"{self._where}: {error}") from None
        if not len(reader):
            raise DataError(f"{self._where}: edl.join(data=...) has no records")
        keras = sys.modules.get("keras")
        if keras is not None and keras.config.backend() == "tensorflow":
            from edl.trainer.step.fused_updates import fuse

            for found, _ in self._state.sources:
                fuse(found)  # an optimizer of Keras
        self._records = Records(
            reader,
            lambda records: (map_leaves(_writable, records), None),
            "edl.join(data=...)",
            host.watch,
            config.training.seed,
            config.data.shuffle,
            lenient=config.data.max_bad_records > 0,
        )
        buffer = config.data.buffer_mebibytes * MEBIBYTE
        if deterministic := config.training.deterministic:
            settle_libraries(config.local.threads)
        self._records.choose_layout(buffer * 0.75, config.workers, deterministic)
        size, blocks = config.training.batch_size, BLOCKS * deterministic
        self._batches = Batches(self._records, size, buffer * 0.25, wait=host.wait, blocks=blocks)
        self._sample = self._records.batch_at(self._records.first(min(SAMPLE, config.training.batch_size)))
        self._turns = Turns()
        self._learner = (BlockLoopLearner if deterministic else LoopLearner)(
            self._state, host.ring.reduce, self._turns, self._sample, config.training.seed
        )
        self._thread = threading.Thread(target=self._train, name="training", daemon=True)
        self._error: BaseException | None = None  # with which that thread has ended
        self.asks_stop = False  # for the end of the training
        self.is_over = False  # all steps are made, and this worker is the one that saves
        self.has_begun = False

    def steps(self) -> Iterator[Step]:
        """Yield the steps of the training.

        In a job, only the worker that saves reaches the end; the others end with the job.

        Raises:
            ModelError: the loop breaks a rule of edl; the text says which, and where.
        """
        if self.has_begun:
            raise ModelError(
                f"{caller()}: job.steps() was called a second time; one call yields the steps of all epochs: "
                "put what follows each epoch under `if step.ends_epoch:`"
            )
        self.has_begun = True
        try:
            yield from self._try()
            self.asks_stop = False
            self._thread.start()
            while (turn := self._turns.next()) is not None:
                yield from self._one(Step(self, turn))
            self.is_over = True
        except ModelError as error:
            raise ModelError(f"{caller()}: {error}") from None
        finally:
            self._turns.leave(f"{self._where}: the loop over job.steps() was left before the job's last step")

    def stop(self) -> None:
        """End the training with the present epoch, on all workers. The loop goes on until `steps` ends it.

        One worker's call is enough. What the decision depends on, such as the best loss so far, is state.
        """
        self.asks_stop = True

    def save(self, function: Save) -> None:
        """Call `function(directory)` on one worker, once the loop is over; it writes the results there.

        The files appear in the job's output directory when the function has returned. If the worker dies
        meanwhile, a different worker saves.

        Raises:
            ModelError: the loop is not over.
        """
        if not self.is_over:
            raise ModelError(f"{caller()}: job.save() was called before the loop over job.steps() was over")
        output = self._host.output
        output.mkdir(parents=True, exist_ok=True)
        with _beside(output) as directory:
            function(directory)

    @property
    def left_early(self) -> str:
        """Why the script must not end now; empty if it may."""
        if not self.has_begun:
            return f"{self._where}: the script has joined, and has not run a loop over job.steps()"
        return (
            "" if self.is_over else f"{self._where}: the loop over job.steps() was left before the job's end"
        )

    def give(self, turn: Turn, tree: Any, loss: Any, metrics: Mapping[str, Any]) -> Any:
        """Return the mean of the ring's gradients; None if the step has not happened."""
        assert self._learner.gradients is not None
        given = self._learner.gradients.given(tree, loss, metrics)
        self._learner.refuse_changed(turn.number)
        return self._turns.give(given)

    def _one(self, step: Step) -> Iterator[Step]:
        yield step
        if not step.is_given:
            raise ModelError(f"the loop's body did not call step.mean() for step {step.number + 1}")

    def _try(self) -> Iterator[Step]:
        """Let the loop run without a ring, and restore the state (trainer/step/loop_trial.py)."""
        learner, trial = self._learner, LoopTrial(self._state, self._where)
        turn = Turn(self._sample.x, 0, len(self._sample))

        def first(tree: Any, loss: Any, metrics: Mapping[str, Any]) -> None:
            learner.refuse_changed(0)
            gradients = Gradients(tree, loss is not None, sorted(metrics))
            trial.gave(gradients.given(tree, loss, metrics))
            found.append(gradients)

        def later(tree: Any, loss: Any, metrics: Mapping[str, Any]) -> Any:
            assert learner.gradients is not None
            learner.refuse_changed(0)
            return learner.own_mean(*trial.gave(learner.gradients.given(tree, loss, metrics)))

        found: list[Gradients] = []
        learner.begin(0, 0, check=True)
        yield from self._one(Step(self, turn, first))
        learner.refuse_changed(0, "after step.mean() had returned None")
        learner.learn(found[0])
        for _ in range(trial.begin(whole=self._host.tries_whole)):
            learner.begin(0, 0, check=True)
            yield from self._one(Step(self, turn, later))
            learner.refuse_grown()
            trial.changed()
        trial.end()

    def _train(self) -> None:
        try:
            self._host.train(self, self._learner, self._batches)
        except LoopLeft:
            pass  # the user's thread knows why, and reports it
        except BaseException as error:
            self._error = error
            self._turns.fail(error)

    def wait(self) -> None:
        """Wait for the end of the training's thread. Raises the exception that it has ended with."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def turns(self) -> Turns:
        """The turns of the user's loop, which the worker's thread offers."""
        return self._turns

    @property
    def seed(self) -> int:
        """The seed of the job."""
        return self._host.config.training.seed

    @property
    def batch_size(self) -> int:
        """The number of records of a step, over all workers; the last step of an epoch may have fewer."""
        return self._host.config.training.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch."""
        return self._batches.steps.per_epoch


class Step:
    """One step of the training, as this worker's loop computes it.

    Args:
        give: takes what `mean` was called with.
    """

    def __init__(
        self, job: Job, turn: Turn, give: Callable[[Any, Any, Mapping[str, Any]], Any] | None = None
    ):
        self._job, self._turn, self._give = job, turn, give
        self._records: Any = None  # as the loop was given them
        self.is_given = False  # whether `mean` was called

    @property
    def records(self) -> Any:
        """This worker's records of the step, as the reader returns them: arrays with an entry for each.

        They are tensors if the data are of PyTorch. float64 becomes float32. With training.deterministic,
        they are a block of the step, and a worker has several of them one after the other.
        """
        if self._records is None:
            self._records = map_leaves(self._job.records, self._turn.records)
        return self._records

    @property
    def number(self) -> int:
        """The number of the step in the job, from 0."""
        return self._turn.number

    @property
    def epoch(self) -> int:
        """The epoch of the step, from 0."""
        return self._turn.number // self._job.steps_per_epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether it is the last step of its epoch."""
        return (self._turn.number + 1) % self._job.steps_per_epoch == 0

    @property
    def seed(self) -> int:
        """A number for the random numbers of this step on this worker: the same when the step comes again."""
        words = np.random.SeedSequence([self._job.seed, self._turn.number, self._turn.rank])
        return int(words.generate_state(1)[0])

    @property
    def weight(self) -> int:
        """The number of these records that count: all or 0.

        It is 0 if this worker has no records in this step and receives a sample.
        """
        return self._turn.weight

    def mean(self, gradients: Any, loss: Any = None, metrics: Mapping[str, Any] | None = None) -> Any:
        """The mean over all records of the step, on all workers.

        Args:
            gradients: modules of PyTorch after `backward()`, or means over `records`: tensors, NumPy arrays
                or None, in a list, tuple, dict or pytree; the same shapes in each step. tf.IndexedSlices
                become dense, and halves are summed as float32.
            loss: the mean loss of `records`, a number; for the history.
            metrics: further means by name, numbers; for the history.

        Returns:
            the gradients of the whole step, in the same structure; None if the step did not happen, and the
            state must stay as it is. The step then comes again, with the same records, or is skipped. With
            training.deterministic, mean also returns None after each block but a worker's last one.

        Raises:
            ModelError: mean was called twice, within a tf.function, or with other shapes than before.
        """
        if self.is_given:
            raise ModelError(f"{caller()}: step.mean() was called a second time for step {self.number + 1}")
        self.is_given = True
        if any(map(tensors.is_symbolic, tensors.flatten(gradients))):
            raise ModelError(
                f"{caller()}: step.mean() was called within a function that is traced, as by tf.function or "
                "jax.jit; call it outside"
            )
        try:
            give = self._give or (lambda *given: self._job.give(self._turn, *given))
            of_modules = tensors.taken(gradients)
            given = gradients if of_modules is None else [each for _, each in of_modules[0]]
            found = {name: tensors.number(value) for name, value in (metrics or {}).items()}
            found[STOP] = float(self._job.asks_stop)
            mean = give(given, None if loss is None else tensors.number(loss), found)
            return mean if mean is None or of_modules is None else of_modules[1](mean)
        except ModelError as error:
            raise ModelError(f"{caller()}: {error}") from None


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """A new directory, whose files are moved into `output` at the end of the block."""
    with scratch.directory(output, artifacts.SAVING) as directory:  # removes those of lost savers, too
        yield directory
        for path in sorted(directory.iterdir()):
            target = output / path.name
            if target.is_dir():
                shutil.rmtree(target)
            path.replace(target)


def _writable(array: Any) -> Any:
    """An array of records that the loop may change, and that PyTorch makes a tensor of without a warning."""
    return array if not isinstance(array, np.ndarray) or array.flags.writeable else array.copy()
