# SPDX-License-Identifier: Apache-2.0
"""A model with its own `train_step`, as the ring sees it.

    gradients(batch)  ->  vector     runs the user's step and its sums; the vector says what else it did
    [ the ring sums the vectors of all ranks ]
    update(total)                    accepts the step

(`sums` is the first two of them, `apply` the third.)

The step runs as it is, on the model's own variables; its optimizers are given the ring's gradients
(trainer/step/mean_gradients.py). It is several collectives: one for each optimizer call, and the worker's
own, which comes last and carries what remains: the losses, what the step has assigned by itself (moving
averages, counters), and the control vector.

**When is such a step in the model?** When the last sum has come back, and only then: until `update` the
values from before the step are kept, and are restored before the state is read or the next step begins.
So a step that breaks in any of its collectives, or is skipped because a number is not finite, or in which no
rank had a record, has not happened. And the last sum comes back nowhere unless all ranks have made
their last contribution, for which they must have all sums before it. So nothing else can tell two ranks
apart than whether they have the last sum, as with any other model: ranks that have it are at step k, the
others, bit for bit, at k - 1, and the next ring continues from a rank at k (docs/ring.md).

The copy costs little: TensorFlow's variables copy on write, so to keep a value costs its memory, and one copy
when the optimizer changes it.

**What the step assigns outside of its optimizers** differs between ranks, since each has seen other records.
Changes of floating-point variables are averaged by records, as in any model; whole numbers count steps
or calls, and must change equally on all ranks. Seeds are set for each step from (job seed, step, rank), and
stay what they are. Metrics begin anew in each step, so that the losses that `train_step` returns are this
step's.

A rank without a batch runs the step on the sample, with weight zero: it has to take part in all sums.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from edl.trainer.agreement import control
from edl.trainer.agreement.metric_values import Value, values_of
from edl.trainer.embedding.interfaces import Commit, Rows, Table
from edl.trainer.embedding.lookups import Lookups
from edl.trainer.model import snapshot
from edl.trainer.model.fingerprint import fingerprint
from edl.trainer.model.variable_spec import VariableSpec
from edl.trainer.records.batches import Batch, Following, nothing_follows
from edl.trainer.step.own_step_graphs import OwnStepGraphs, tensors_of


class OwnStepLearner(OwnStepGraphs):
    """A model that overrides `train_step`, as a step with several sums. Arguments: see `OwnStepGraphs`."""

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
        """Run the step, and make its last sum. Nothing is changed until that is applied.

        Raises:
            RingBroken: one of its sums did not come back.
        """
        ours = (
            self.nothing(contribution) if batch is None else self.gradients(batch, contribution, step, rank)
        )
        ready_at = time.monotonic()
        total = self._reduce(ours)
        waited = time.monotonic() - ready_at
        at_fault = control.read(np.asarray(memoryview(ours))[self.length :]).nonfinite
        return control.StepResult(self.agreed(total), at_fault, waited, 0, total)

    def apply(self, sums: control.StepResult) -> None:
        """Accept the step that was run last.

        Raises:
            ModelError: workers do not agree on what it did. Nothing is changed then.
        """
        self.update(sums.given)

    tables: tuple[Table, ...] = ()
    whole = live = staticmethod(contextlib.nullcontext)
    lookups: Lookups | None = None  # it has no rows on servers
    others: tuple[Any, ...] = ()
    missing = staticmethod(str)

    def use(self, rows: Rows, at: Callable[[], int]) -> None:
        """Nothing to do: such a model has no tables."""

    def ready(self, batch: Batch) -> Batch:
        """Convert a batch's arrays to tensors on the thread that reads, so that the step can begin sooner."""
        return replace(batch, tensors=tensors_of(batch))

    def commit(self, step: int, sums: control.StepResult) -> Commit:
        """Return a commit that changes no rows, because this step changes none."""
        return Commit(step, skipped=True, scale=0.0, learning_rate=0.0, iteration=0)

    # --- the parts of them

    def gradients(self, batch: Batch, contribution: np.ndarray, step: int, rank: int) -> tf.Tensor:
        """Run the step on `batch`; this rank's part of its last sum, float32 [length + len(contribution)].

        Raises:
            RingBroken: one of the sums within the step did not come back. Nothing is changed then.
        """
        return self._run(batch, len(batch), contribution, np.array([step, rank], np.int64))

    def nothing(self, contribution: np.ndarray) -> tf.Tensor:
        """The contribution of a rank without a batch."""
        assert self._sample is not None, "there are no records at all"
        return self._run(self._sample, 0, contribution, np.zeros(2, np.int64))

    def agreed(self, total: tf.Tensor) -> control.Agreed:
        """Read the control vector at the end of a summed vector."""
        agreed = control.read(np.asarray(memoryview(total))[self.length :])
        if agreed.nonfinite or not agreed.records:
            self._put_back()  # there will be no update
        return agreed

    def update(self, total: tf.Tensor) -> None:
        """Accept the step.

        Raises:
            ModelError: workers do not agree on what it did. Nothing is changed then.
        """
        assert self._before is not None, "no step to accept"
        equal = self._accept(total, self._ours, *self._touched_before())
        if not np.all(equal):
            names = [
                v.name.partition(":")[0]
                for v, same in zip(self._assigned, np.asarray(equal), strict=True)
                if not same
            ]
            raise ModelError(
                f"{self._name} changes {', '.join(names)} differently on different workers; "
                "a variable of whole numbers must change equally on all (changes of others are averaged)"
            )
        self._before = None

    has_loss = False  # `fit` has one only if `train_step` returns one

    def take_metrics(self) -> dict[str, Value]:
        """Return and reset the entries that `train_step` returns, as `fit` has them in its history.

        Results of metrics are means over the records of all steps since the last call; other entries are the
        last step's. The call changes the state: make it on all ranks after the same step.
        """
        self._put_back()
        told, size = self._told.numpy(), self._size
        self._told.assign(tf.zeros_like(self._told))
        if not told[size]:
            return {}
        edges = np.cumsum([0, *map(math.prod, self._shapes)]).tolist()
        means, last = told[:size] / told[size], told[size + 1 :]
        given = zip(self._losses, self._shapes, self._whole_epoch, itertools.pairwise(edges), strict=True)
        return values_of(
            {
                name: (means if of_all else last)[slice(*ends)].reshape(shape)
                for name, shape, of_all, ends in given
            }
        )

    def finish_training(self) -> None:
        """Do what Keras' `fit` does at its end, before the model is evaluated and saved.

        No step may follow.
        """
        self._put_back()
        if self.model.optimizer is not None:
            self.model.optimizer.finalize_variable_values(self.model.trainable_variables)

    # --- the state

    can_catch_up = False  # the step changes the model while its sums are made

    @property
    def nbytes(self) -> int:
        return snapshot.nbytes(self._all)

    @property
    def _all(self) -> list[tf.Variable]:
        """All variables except the metrics', and the sums of losses that are reported later."""
        return [*self._variables, self._told]

    @property
    def variables(self) -> list[tf.Variable]:
        return self._all

    def variable_specs(self) -> list[VariableSpec]:
        return snapshot.variable_specs(self._all, self.model)

    def state(self) -> np.ndarray:
        """The state of all variables, uint8 [bytes]."""
        return snapshot.joined(self.parts())

    def parts(self) -> list[np.ndarray]:
        self._put_back()
        return snapshot.parts(self._all)

    def load(self, state: np.ndarray) -> None:
        """Replace the state by a different worker's `state`.

        Raises:
            ModelError: it is not a state of this model; nothing is changed then.
        """
        self.take_over(self.prepared(snapshot.divided(self._all, state)))

    def prepared(self, parts: list[np.ndarray]) -> list[Any]:
        """Prepare a different worker's `parts` for `take_over`, on any thread. Raises like `load`."""
        return snapshot.prepared(self._all, parts)

    def take_over(self, values: list[Any]) -> None:
        """Replace the state by prepared values."""
        self._put_back()
        snapshot.take_over(self._all, values)

    def change(self, values: Mapping[int, np.ndarray]) -> None:
        """Set some of the variables of `parts`, by index."""
        self._put_back()
        snapshot.change(self._all, values)

    def kept(self) -> snapshot.Kept:
        """A copy of the state for `restore`, after something was tried."""
        self._put_back()
        return snapshot.Kept(self._all)

    def restore(self, kept: snapshot.Kept) -> None:
        self._put_back()
        kept.put_back()

    def digest(self) -> str:
        """Return the XXH3 hash of the state: equal on two workers if their models are equal, bit for bit."""
        return snapshot.digest(self.parts())

    def fingerprint(self) -> str:
        """A digest of the model's definition, equal on all workers of a job."""
        self._fingerprint = self._fingerprint or fingerprint(self.model)  # as it was before any callback
        return self._fingerprint
