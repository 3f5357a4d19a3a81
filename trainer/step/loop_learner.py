# SPDX-License-Identifier: Apache-2.0
"""A user's own training loop, as the ring sees it: a learner whose gradients and updates are made elsewhere.

    allreduce_step   offers the step to the user's loop, and sums the gradients that it gives
    apply            returns the mean to the loop, which changes its state, and comes round

Nothing is known of the user's model but the shapes of its gradients and the variables of its state. So what
other learners prevent is found by digests of each variable:

    at this worker               a loop that changes its state before the mean, and one whose updates do not
                                 change the state at all
    in the all-reduce of a step  a state that differs between workers: each rank compares its own digests with
                                 the mean of all

They are computed in some steps only, because they read the whole state: in the first steps of the job, in
those of each ring, whose new members may lack something that is not in the state, and in each hundredth.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edl.errors import ModelError
from edl.trainer.agreement import control
from edl.trainer.agreement.metric_values import Value
from edl.trainer.embedding.interfaces import Commit, Table
from edl.trainer.model import tensors
from edl.trainer.model.adapter import Spec
from edl.trainer.model.digests import digest
from edl.trainer.model.loop_state import METRICS, MISSING, REPLACED, WORDS, LoopState, named
from edl.trainer.model.variable_spec import VariableSpec
from edl.trainer.records.batches import Batch, Following, nothing_follows
from edl.trainer.ring.base import RingBroken, Vector
from edl.trainer.step.turns import Given, Turn, Turns

ALIGNED = 16  # values: each gradient begins at a multiple of 64 bytes, where a tensor may share its memory
CHUNK = 1 << 16  # values that are multiplied and checked while they are in the processor's cache
FIRST_CHECKED, CHECKED = 3, 100  # the state is compared in the first steps, and then in one of so many
MOVES = 50  # updates with gradients that are not zero, which cannot all leave the whole state as it was
SALTS = np.array([2654435761, 2246822519], np.uint64)  # odd, so that (step, rank) spreads over a seed's bits
CACHE_LINE = 64  # bytes
ONLY_OURS = 2  # references: that of the list, and that of the call that counts
STOP = "edl/stop"  # a metric that is not 0 if a worker asks for the end of the training
UNCHECKED = np.zeros((0, WORDS), np.float32)
RULE = (
    "between two steps only the result of step.mean() may change the state, because workers see different "
    "records and steps may come again"
)
CAUSES = (  # the likeliest first
    f"either {MISSING}, so that a new worker has not received it, or something other than the result of "
    "step.mean() changes the state. If both are excluded: an operation whose result depends on the machine, "
    "or bad memory"
)


class Gradients:
    """The structure of what a loop passes to `step.mean`, the same in each step.

    Args:
        tree: gradients as they were passed the first time.
        has_loss: whether a loss was passed.
        metrics: the names of the metrics.

    Raises:
        ModelError: one of them is no array of floating-point numbers.
    """

    def __init__(self, tree: Any, has_loss: bool, metrics: Sequence[str]):
        self.has_loss, self.metrics = has_loss, tuple(metrics)
        flat = tensors.flatten(tree)
        self._tree = tensors.pack(tree, [None] * len(flat))
        self.leaves = [_spec(i, given) for i, given in enumerate(flat)]
        wide = any(leaf is not None and leaf.dtype == "float64" for leaf in self.leaves)
        self.dtype: np.dtype[Any] = np.dtype(np.float64 if wide else np.float32)
        rooms = [-(-_size(leaf) // ALIGNED) * ALIGNED for leaf in self.leaves]
        self.starts = [0, *itertools.accumulate(rooms)]  # of each leaf in a vector, and the end of the last
        self.size = self.starts[-1]

    def given(self, tree: Any, loss: Any, metrics: Mapping[str, Any]) -> Given:
        """Convert what `step.mean` was called with.

        Raises:
            ModelError: the gradients or metrics are not as in the first step.
        """
        arrays = tensors.flatten(tree)
        found = [_spec(i, given) for i, given in enumerate(arrays)]
        if len(found) != len(self.leaves):
            raise ModelError(
                f"step.mean() was given {len(found)} gradients, in earlier steps {len(self.leaves)}"
            )
        for i, (now, before) in enumerate(zip(found, self.leaves, strict=True)):
            if (now and now.shape) != (before and before.shape):
                raise ModelError(
                    f"gradient {i} of step.mean() is {_shown(now)}, in earlier steps it was {_shown(before)}"
                )
        if tuple(sorted(metrics)) != self.metrics:
            raise ModelError(
                f"step.mean() was given the metrics {sorted(metrics)}, in earlier steps {list(self.metrics)}"
            )
        flat = [None if a is None else tensors.array(a).reshape(-1) for a in arrays]
        return Given(flat, float(0.0 if loss is None else loss), [float(metrics[m]) for m in self.metrics])

    def fill(self, to: np.ndarray, given: Given, weight: float) -> bool:
        """Write the gradients times `weight`, [size]; returns whether all are finite."""
        finite = True
        ranges = itertools.pairwise(self.starts)
        for leaf, array, (start, end) in zip(self.leaves, given.gradients, ranges, strict=True):
            size = _size(leaf)
            to[start + size : end] = 0.0
            for at in range(0, size, CHUNK):
                chunk = to[start + at : start + min(at + CHUNK, size)]
                np.multiply(array[at : at + CHUNK], self.dtype.type(weight), out=chunk, casting="unsafe")
                finite = finite and math.isfinite(chunk.min()) and math.isfinite(chunk.max())
        return finite

    def mean(self, total: np.ndarray, records: int) -> Any:
        """The mean of each gradient, in the structure and the types that were given.

        Args:
            total: the sums, [at least size], in whose memory the means are then.
        """
        memory = total[: self.size]
        np.multiply(memory, self.dtype.type(1.0 / records), out=memory)
        found = [
            None if leaf is None else leaf.restore(memory[start : start + _size(leaf)].reshape(leaf.shape))
            for leaf, start in zip(self.leaves, self.starts, strict=False)
        ]
        return tensors.pack(self._tree, found)

    def any(self, total: np.ndarray) -> bool:
        """Whether a gradient is not zero, from sums as those that `fill` writes."""
        return any(total[at : min(at + CHUNK, self.size)].any() for at in range(0, self.size, CHUNK))

    def labels(self) -> list[str]:
        return [*map(_shown, self.leaves), *self.metrics]


class Memory:
    """Memory of the vectors of steps, which is used again when nothing refers to it any more.

    Memory that is touched for the first time costs more than what is written to it. A loop may keep the means
    of a step, which share the memory of its vector, for as long as it likes.
    """

    def __init__(self) -> None:
        self._owners: list[np.ndarray] = []  # uint8 [bytes]

    def take(self, length: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Return [length] values that nothing else uses. They begin at a multiple of 64 bytes."""
        nbytes = length * dtype.itemsize + CACHE_LINE
        fitting = [i for i, owner in enumerate(self._owners) if len(owner) == nbytes]
        unused = [i for i in fitting if sys.getrefcount(self._owners[i]) == ONLY_OURS]
        if unused:
            owner = self._owners[unused[0]]
        else:
            owner = np.empty(nbytes, np.uint8)
            self._owners = [*(self._owners[i] for i in fitting[-1:]), owner]  # at most two
        begin = -owner.ctypes.data % CACHE_LINE
        return owner[begin : begin + length * dtype.itemsize].view(dtype)


class LoopLearner:
    """A user's loop as a learner (trainer/step/interfaces.py).

    Args:
        state: what the loop trains.
        reduce: the ring's all-reduce.
        turns: where the user's thread takes its steps.
        sample: a batch of a few real records, for a rank whose part of a step is empty.
        seed: of the job, for the seeds of random layers.
    """

    tables: tuple[Table, ...] = ()
    can_catch_up = False  # a newcomer has no gradients to begin with

    def __init__(
        self,
        state: LoopState,
        reduce: Callable[[Vector], Vector],
        turns: Turns,
        sample: Batch,
        seed: int,
    ):
        self.turns, self._state, self._reduce, self._sample, self._seed = turns, state, reduce, sample, seed
        self.gradients: Gradients | None = None  # known after the loop's first turn
        self.has_loss = True
        self.is_stopped = False  # whether a worker has asked for the end of the training in an epoch
        self._memory = Memory()
        self._metrics = np.zeros(0)  # sums of metric times records in this epoch, and these records
        self._checked = UNCHECKED  # digests of this step; empty if it is not checked
        self._before = self._checked  # at the beginning of the turn
        self._whole = False  # whether they are computed again after the gradients of this step
        self._new = 0  # number of next steps that are checked, because the ring is new
        self._still = UNCHECKED  # digests at an earlier step, to which no state was taken over since then
        self._moves = 0  # updates since then whose gradients were not zero

    # --- the loop's first turn, and the beginning and end of each

    def learn(self, gradients: Gradients) -> None:
        """Learn what the loop passes to `step.mean`."""
        self.gradients, self.has_loss = gradients, gradients.has_loss
        self._metrics = np.zeros(len(gradients.metrics) + 1)
        self._state.add(METRICS, self._metrics)

    def begin(self, step: int, rank: int, check: bool, whole: bool = True) -> None:
        """Prepare the state for a turn: set the seeds of random layers.

        Args:
            check: whether digests of the state are computed.
            whole: whether they are computed after the gradients, too.
        """
        words = (self._seed + np.array([step, rank], np.uint64) * SALTS) % np.uint64(1 << 31)
        self._state.set_seeds(words.astype(np.uint32))
        self._before, self._whole = self._state.digests() if check else UNCHECKED, whole

    def compare_first_steps(self) -> None:
        """Compare the workers' states in the next steps: the ring is new."""
        self._new = FIRST_CHECKED

    def own_mean(self, given: Given, scale: float) -> Any:
        """The gradients of a turn without a ring, times `scale`, as `apply` would give them."""
        vector = self._memory.take(self._gradients.size, self._gradients.dtype)
        self._gradients.fill(vector, given, scale)
        return self._gradients.mean(vector, 1)

    def refuse_grown(self) -> None:
        """Refuse a loop that makes variables in a step.

        Raises:
            ModelError: an object of the state has more variables than at the start.
        """
        if grown := self._state.grown():
            raise ModelError(
                f"{grown} has made variables in a step, which are not in the state of edl.join(); make them "
                "before: a Keras optimizer by optimizer.build(model.trainable_variables)"
            )

    def refuse_changed(self, step: int, when: str = "before it called step.mean()") -> None:
        """Refuse a loop that has changed its state in this turn by itself, if the step is checked.

        Raises:
            ModelError: names the variables; or an optimizer has made its variables already.
        """
        self._checked = self._state.digests() if len(self._before) and self._whole else self._before
        if len(self._checked) > len(self._before):
            raise ModelError(f"step {step + 1} has made variables of the state {when}; {RULE}")
        if names := self._names(self._checked != self._before):
            raise ModelError(f"step {step + 1} has changed {names} of the state {when}; {RULE}")

    def _names(self, unlike: np.ndarray) -> str:
        """The variables whose digests differ, bool [variables, WORDS], in words; empty if none does."""
        return named([n for n, differs in zip(self._state.names, unlike, strict=False) if differs.any()])

    # --- the two halves of a step

    def allreduce_step(
        self,
        batch: Batch | None,
        contribution: np.ndarray,
        step: int,
        rank: int,
        records: int,
        following: Following = nothing_follows,
    ) -> control.StepResult:
        told = contribution.copy()
        if records:
            vector = self._turn(batch, told, step, rank)
        else:
            self._checked = self._before = UNCHECKED
            vector = self._filled(None, 0, told)
        ready_at = time.monotonic()
        try:
            total = self._summed(vector)
        except RingBroken:
            if records:
                self.turns.answer(None)
            raise
        waited = time.monotonic() - ready_at
        self._refuse_unlike(total, step)
        self._new = max(self._new - 1, 0)
        agreed = control.read(total[-control.LENGTH :])
        if records and (agreed.nonfinite or not agreed.records):
            self.turns.answer(None)  # there will be no update
        at_fault = bool(told[control.NONFINITE])
        return control.StepResult(agreed, at_fault, waited, total.nbytes, total)

    def _turn(self, batch: Batch | None, told: np.ndarray, step: int, rank: int) -> np.ndarray:
        """Let the user's loop compute this rank's part of a step; return its summands."""
        count = len(batch) if batch is not None else 0
        self.turns.rest()
        whole = step < FIRST_CHECKED or step % CHECKED == 0
        self.begin(step, rank, check=whole or self._new > 0, whole=whole)
        if step % CHECKED == 0:
            self._refuse_still(step)
        used = batch if batch is not None and count else self._sample
        return self._filled(self.turns.offer(Turn(used.x, step, count, rank)), count, told)

    def _summed(self, vector: np.ndarray) -> np.ndarray:
        """Return the sums over the ring, in memory that is this worker's own."""
        total = self._reduce(vector)
        if total is not vector:  # a ring on threads, whose members share a result
            np.copyto(vector, total)
        return vector

    def apply(self, result: control.StepResult) -> None:
        """Give the loop the mean, and wait until it has applied it.

        Raises:
            ModelError: the loop has made variables that are not in its state.
        """
        total, records = result.given, result.agreed.records
        self._moves += self._gradients.any(total)
        self._metrics += [*total[self._gradients.size : self._after_metrics], records]
        self.turns.answer(self._gradients.mean(total, records))
        self.refuse_grown()

    def commit(self, step: int, result: control.StepResult) -> Commit:
        """Return a commit that changes no rows: there are no tables."""
        return Commit(step, skipped=True, scale=0.0, learning_rate=0.0, iteration=0)

    # The vector of a step: the gradients, the metrics, the digests, 1 if this rank has computed its digests,
    # and the control vector.

    @property
    def _gradients(self) -> Gradients:
        assert self.gradients is not None, "the loop's first turn is not over"
        return self.gradients

    @property
    def _after_metrics(self) -> int:
        return self._gradients.size + len(self._gradients.metrics)

    @property
    def _length(self) -> int:
        return self._after_metrics + len(self._state.names) * WORDS + 1 + control.LENGTH

    def _room(self) -> np.ndarray:
        """Memory for the summands of a turn."""
        return self._memory.take(self._length, self._gradients.dtype)

    def _filled(self, given: Given | None, count: int, told: np.ndarray) -> np.ndarray:
        """Write the contribution of these records, and complete its control vector."""
        to = self._room()
        if given is None or not count:
            to[:] = 0.0
        else:
            finite = self._gradients.fill(to, given, count)
            to[self._gradients.size : self._after_metrics] = np.multiply(given.metrics, count)
            told[control.RECORDS], told[control.LOSS] = count, given.loss * count
            finite &= bool(np.isfinite(to[self._gradients.size : self._after_metrics]).all())
            told[control.NONFINITE] = not (finite and math.isfinite(given.loss))
        to[self._after_metrics : -control.LENGTH - 1] = (
            self._checked.reshape(-1) if len(self._checked) else 0.0
        )
        to[-control.LENGTH - 1] = len(self._checked) > 0
        to[-control.LENGTH :] = told
        return to

    def _refuse_unlike(self, total: np.ndarray, step: int) -> None:
        """Refuse a step, if it is checked, in which this rank's state is not that of all.

        Raises:
            ModelError: names the variables that differ.
        """
        if not len(self._checked):
            return
        ranks, theirs = total[-control.LENGTH - 1], total[self._after_metrics : -control.LENGTH - 1]
        if names := self._names(self._checked * ranks != theirs.reshape(-1, WORDS)):
            raise ModelError(f"at step {step + 1} the workers' states differ in {names}: {CAUSES}")

    def _refuse_still(self, step: int) -> None:
        """Refuse a loop whose updates leave the whole state as it is.

        Some arrays may be frozen, and a learning rate may be 0 for some steps. The metrics are the last
        variable, which edl itself changes.

        Raises:
            ModelError: the loop has applied MOVES updates, and nothing has changed.
        """
        if self._moves >= MOVES and np.array_equal(self._before[:-1], self._still[:-1]):
            names = named(self._state.names[:-1])
            raise ModelError(
                f"step {step + 1}: {self._moves} updates with gradients that are not zero have not changed "
                f"{names}. Probably {REPLACED}"
            )
        self._still, self._moves = self._before, 0

    # --- metrics, the end

    def take_metrics(self) -> dict[str, Value]:
        sums, records = self._metrics[:-1].copy(), self._metrics[-1]
        self._metrics[:] = 0.0
        if not records:
            return {}
        found = dict(zip(self._gradients.metrics, (sums / records).tolist(), strict=True))
        self.is_stopped = self.is_stopped or found.pop(STOP, 0.0) > 0
        return found

    # --- the state

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.parts()))

    def variable_specs(self) -> list[VariableSpec]:
        return self._state.specs()

    def parts(self) -> list[np.ndarray]:
        return self._state.parts()

    def prepared(self, parts: list[np.ndarray]) -> Any:
        return self._state.prepared(parts)

    def take_over(self, values: Any) -> None:
        self._state.take_over(values)
        self._still, self._moves = UNCHECKED, 0

    def change(self, values: Mapping[int, np.ndarray]) -> None:
        if not values:
            return
        self.take_over(self.prepared([values.get(i, part) for i, part in enumerate(self.parts())]))

    def fingerprint(self) -> str:
        made = [[*map(list, self._state.specs())], self._gradients.labels()]
        return hashlib.sha256(json.dumps(made, default=list).encode()).hexdigest()

    def digest(self) -> str:
        return digest(self.parts()).hex()


def _spec(place: int, gradient: Any) -> Spec | None:
    if gradient is None:
        return None
    found = tensors.spec(gradient)
    if found is None:
        raise ModelError(
            f"gradient {place} of step.mean() is of type {type(gradient).__name__}; pass tensors, NumPy "
            "arrays or None"
        )
    if not found.is_float:
        raise ModelError(
            f"gradient {place} of step.mean() is of {found.dtype}, and must be of floating-point numbers"
        )
    return found


def _size(leaf: Spec | None) -> int:
    return 0 if leaf is None else math.prod(leaf.shape)


def _shown(leaf: Spec | None) -> str:
    return "None" if leaf is None else f"float {list(leaf.shape)}"
