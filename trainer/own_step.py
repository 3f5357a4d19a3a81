"""A model with its own `train_step`, as the ring sees it.

    gradients(batch)  ->  vector     runs the user's step and its sums; the vector says what else it did
    [ the ring sums the vectors of all ranks ]
    update(total)                    accepts the step

(`sums` is the first two of them, `apply` the third.)

The step runs as it is, on the model's own variables; its optimizers are given the ring's gradients
(trainer/mean_gradients.py). It is several collectives: one for each optimizer call, and the worker's
own, which comes last and carries what remains: the losses, what the step has assigned by itself (moving
averages, counters), and the control vector.

**When is such a step in the model?** When the last sum has come back, and only then: until `update` the
values from before the step are kept, and whoever asks for the state, or begins another step, finds them put
back. So a step that breaks in any of its collectives, or is skipped because a number is not finite, or in
which no rank had a record, has not happened. And the last sum comes back nowhere unless all ranks have made
their last contribution, for which they must have all sums before it. So nothing else can tell two ranks
apart than whether they have the last sum, as with any other model: those who have it are at step k, the
others, bit for bit, at k - 1, and the next ring goes on from one who is at k (docs/ring.md).

The copy costs little: TensorFlow's variables copy on write, so to keep a value costs its memory, and one copy
when the optimizer changes it.

**What the step assigns outside of its optimizers** differs between ranks, since each has seen other records.
Of floating-point variables the changes are averaged by records, as in any model; whole numbers count steps
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from trainer import arrays, control, snapshot
from trainer.batch_norm import is_synchronized, synchronized
from trainer.captured import (
    assigned_in,
    attributes_of,
    depends_on,
    distinct,
    is_generator,
    metric_variables,
    metrics_of,
    plain,
    read_in,
)
from trainer.data import Batch
from trainer.described import Described
from trainer.fingerprint import fingerprint
from trainer.graphs import compiled, concrete
from trainer.lookups import Lookups
from trainer.mean_gradients import MeanGradients
from trainer.metric_values import Value, values_of
from trainer.model_support import flat_logs, is_half
from trainer.ring.base import Vector
from trainer.roles import Commit, Rows, Table
from trainer.trial import Inexact, Run, try_own_step


class OwnStepLearner:
    """A model that overrides `train_step`, as a step with several sums.

    Args:
        model: compiled.
        sample: a batch of real records; None when there are none.
        reduce: of the ring, for the sums within a step.
        inexact, warn: as in trainer/learner.py.

    Raises:
        ModelError: its step cannot be run over a ring; the text says why.
    """

    def __init__(
        self,
        model: keras.Model,
        sample: Batch | None,
        reduce: Callable[[Vector], Vector],
        inexact: str = "warn",
        warn: Callable[[str], None] = print,
    ):
        self.model = model
        self._name = f"{type(model).__name__}.train_step()"
        self._means, self._reduce = MeanGradients(reduce), reduce
        self._fingerprint = ""
        self._variables = _distinct(model.variables)
        self._before: list[tf.Tensor] | None = None  # values of the variables, while a step is not accepted
        self._losses: list[str] = []
        self._shapes: list[tuple[int, ...]] = []  # of what the step returns by these names
        self._whole_epoch: list[bool] = []  # whether it is a metric's result over the steps of an epoch
        self._graphs: dict[tuple[tf.TypeSpec, ...], Any] = {}  # of the step, by the types of the records
        # Of what the steps returned since it was taken last: the sums over their records, the number of these
        # records, and what the last step returned.
        self._told = tf.Variable(tf.zeros([1], tf.float64), shape=[None], trainable=False, name="losses_told")
        self._sample = sample
        if sample is not None:
            self._build(sample)
        if tables := Lookups(model).tables:
            raise ModelError(
                f"the rows of layer {tables[0].name!r} are on servers, but {self._name} is a step of its "
                "own, which says itself how all is trained. Override compute_loss() instead, or give the "
                "layer an input_dim and train it with mode=train"
            )
        if sample is not None:
            if len(sample) > 1 and (inexact != "allow" or self._means.rows):
                self._try(sample, Inexact(inexact, warn))
        else:
            self._leave_out_metrics()

    # --- the two halves of a step

    def sums(
        self, batch: Batch | None, contribution: np.ndarray, step: int, rank: int, records: int
    ) -> control.Sums:
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
        return control.Sums(self.agreed(total), at_fault, waited, 0, total)

    def apply(self, sums: control.Sums) -> None:
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
        """There are no tables, whoever has rows."""

    def ready(self, batch: Batch) -> Batch:
        """With its arrays as tensors: on the thread that reads, so that the step need not wait for it."""
        return replace(batch, tensors=_tensors(batch))

    def commit(self, step: int, sums: control.Sums) -> Commit:
        """There are no rows that were changed."""
        return Commit(step, skipped=True, scale=0.0, learning_rate=0.0, iteration=0)

    # --- the parts of them

    def gradients(self, batch: Batch, contribution: np.ndarray, step: int, rank: int) -> tf.Tensor:
        """Run the step on `batch`; this rank's part of its last sum, float32 [length + len(contribution)].

        Raises:
            RingBroken: one of the sums within the step did not come back. Nothing is changed then.
        """
        return self._run(batch, len(batch), contribution, np.array([step, rank], np.int64))

    def nothing(self, contribution: np.ndarray) -> tf.Tensor:
        """The same for a rank that has no batch."""
        assert self._sample is not None, "there are no records at all"
        return self._run(self._sample, 0, contribution, np.zeros(2, np.int64))

    def agreed(self, total: tf.Tensor) -> control.Agreed:
        """What the control vector at the end of a summed vector says."""
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
        """The entries that `train_step` returns, as `fit` has them in its history: results of metrics are
        means over the records of all steps since they were taken last, other entries are the last step's.

        It is a change of the state: to be made on all ranks after the same step.
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

    @property
    def _size(self) -> int:
        """How many numbers the step returns."""
        return sum(map(math.prod, self._shapes))

    def finish_training(self) -> None:
        """What Keras' `fit` does at its end, before the model is evaluated and saved. No step may follow."""
        self._put_back()
        if self.model.optimizer is not None:
            self.model.optimizer.finalize_variable_values(self.model.trainable_variables)

    # --- the state

    follows = False  # the step changes the model while its sums are made

    @property
    def nbytes(self) -> int:
        return snapshot.nbytes(self._all)

    @property
    def _all(self) -> list[tf.Variable]:
        """All variables but the metrics', and what is to be told of the losses."""
        return [*self._variables, self._told]

    @property
    def variables(self) -> list[tf.Variable]:
        return self._all

    def described(self) -> list[Described]:
        return snapshot.described(self._all, self.model)

    def warm_up(self) -> None:
        """Nothing: a worker that joins a ring runs nothing else."""

    def state(self) -> np.ndarray:
        """Of all variables, uint8 [bytes]."""
        return snapshot.joined(self.parts())

    def parts(self) -> list[np.ndarray]:
        self._put_back()
        return snapshot.parts(self._all)

    def load(self, state: np.ndarray) -> None:
        """Take over another worker's `state`.

        Raises:
            ModelError: it is not the state of this model; nothing is changed then.
        """
        self.take_over(self.prepared(snapshot.divided(self._all, state)))

    def prepared(self, parts: list[np.ndarray]) -> list[Any]:
        """Another worker's `parts`, for `take_over`: on any thread. Raises as `load` does."""
        return snapshot.prepared(self._all, parts)

    def take_over(self, values: list[Any]) -> None:
        """Take over what was prepared."""
        self._put_back()
        snapshot.take_over(self._all, values)

    def change(self, values: Mapping[int, np.ndarray]) -> None:
        """Give some of the variables of `parts` other values."""
        self._put_back()
        snapshot.change(self._all, values)

    def kept(self) -> snapshot.Kept:
        """All of it, for `restore`, after something was tried."""
        self._put_back()
        return snapshot.Kept(self._all)

    def restore(self, kept: snapshot.Kept) -> None:
        self._put_back()
        kept.put_back()

    def digest(self) -> str:
        """XXH3 of the state: equal on two workers when their models are, bit for bit."""
        return snapshot.digest(self.parts())

    def fingerprint(self) -> str:
        """Of how the model is made, equal on all workers of a job."""
        self._fingerprint = self._fingerprint or fingerprint(self.model)  # as it was before any callback
        return self._fingerprint

    def _put_back(self) -> None:
        """Undo the step that was not accepted."""
        if self._before is not None:
            before, self._before = self._before, None
            self._restore(*before)

    # --- a step

    def _run(self, batch: Batch, records: int, contribution: np.ndarray, draw: np.ndarray) -> tf.Tensor:
        self._put_back()
        self._before = self._begin(np.float32(records), draw)
        try:
            with self._means.sum.ring_errors():
                losses = self._step(_tensors(batch))
            self._ours = self._collect(contribution, losses, *self._touched_before())
        except BaseException:
            self._put_back()
            raise
        return self._ours

    def _step(self, tensors: list[tf.Tensor]) -> tf.Tensor:
        """The user's step: its losses, float32 [n]."""
        if self.model.run_eagerly:
            return self._train_step(*tensors)
        kind = _kind(tensors)
        if kind not in self._graphs:  # records of another length than any before: traced as Keras does it
            self._graphs[kind] = concrete(self._train_step, *kind)
        return self._graphs[kind](*tensors)

    def _train_step(self, *tensors: tf.Tensor, rehearsing: bool = False) -> tf.Tensor:
        left = iter(tensors)
        x, y, weights = keras.tree.map_structure(lambda a: None if a is None else next(left), self._structure)
        ring = self._means if is_synchronized(self.model) and not rehearsing else None
        with self._means.in_charge(rehearsing), synchronized(ring, self._means.records.read_value() > 0):
            losses = flat_logs(self.model.train_step(keras.utils.pack_x_y_sample_weight(x, y, weights)))
        if not isinstance(losses, dict) or not losses:
            raise ModelError(
                f"{self._name} must return a dict of its losses, e.g. {{'loss': loss}}, not {losses!r}"
            )
        given = [tf.cast(value, tf.float32) for value in losses.values()]
        given = [value if value.shape.is_fully_defined() else tf.reduce_mean(value) for value in given]
        self._losses, self._shapes = list(losses), [tuple(value.shape) for value in given]
        if not (
            self._whole_epoch and tf.executing_eagerly()
        ):  # all steps and all workers have what the first has
            self._whole_epoch = self._results_of_metrics(losses)
        return tf.concat([tf.reshape(value, [-1]) for value in given], 0)

    def _results_of_metrics(self, losses: Mapping[str, Any]) -> list[bool]:
        """Which entries `fit` has over the whole epoch. With the names of the model's metrics, it asks these;
        else it takes what the last step returned, which are results over the epoch if metrics gave them."""
        results: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # Keras': compiled metrics that train_step() does not update
            results = flat_logs(self.model.get_metrics_result())
        if losses.keys() == results.keys():
            return [True] * len(losses)
        if tf.executing_eagerly():  # nothing shows where a number comes from but its value
            return [any(np.array_equal(v, result) for result in results.values()) for v in losses.values()]
        variables = metric_variables(self.model)
        return [tf.is_symbolic_tensor(v) and depends_on(v, variables) for v in losses.values()]

    def _touched_before(self) -> list[tf.Tensor]:
        assert self._before is not None
        return [self._before[i] for i in self._touched]

    # --- building

    def _build(self, sample: Batch) -> None:
        """Create every variable, and find those that the step touches. Changes no value."""
        self._structure = (sample.x, sample.y, sample.weights)
        tensors = _tensors(sample)
        assigned = self._rehearse(tensors) if self.model.run_eagerly else self._trace(tensors)
        if not self._means.called:
            raise ModelError(
                f"{self._name} calls no Keras optimizer. Over a ring its gradients are summed where it calls "
                "optimizer.apply() or optimizer.apply_gradients(); without such a call the workers' models "
                "would differ"
            )
        self._leave_out_metrics()
        known = {id(v): i for i, v in enumerate(self._variables)}
        self._assigned = [v for v in _distinct(assigned) if id(v) in known and not _is_seed(v)]
        seeds = [v for v in self._variables if _is_seed(v)]
        for v in self._assigned:
            if not (v.dtype.is_floating or v.dtype.is_integer or v.dtype.is_bool):
                raise ModelError(
                    f"{self._name} assigns variable {v.name!r} of type {v.dtype.name}; only numbers can"
                )
        self._touched = [known[id(v)] for v in [*self._assigned, *seeds]]
        self._sizes = [v.shape.num_elements() for v in self._assigned] + [self._size]
        self.length = sum(self._sizes)
        self._told.assign(tf.zeros([2 * self._size + 1], tf.float64))
        floats, ours = tf.TensorSpec([None], tf.float32), tf.TensorSpec([self._size], tf.float32)
        values = [tf.TensorSpec(v.shape, v.dtype) for v in self._variables]
        touched = [values[i] for i in self._touched]
        draw = tf.TensorSpec([2], tf.int64)
        self._begin = compiled(self._begin_graph, tf.TensorSpec([], tf.float32), draw)
        self._collect = compiled(self._collect_graph, floats, ours, *touched)
        self._accept = compiled(self._accept_graph, floats, floats, *touched)
        self._restore = compiled(self._restore_graph, *values)

    def _leave_out_metrics(self) -> None:
        others = [*metric_variables(self.model), *self._means.variables]
        self._variables = _distinct(self._variables, without=others)

    def _trace(self, tensors: list[tf.Tensor]) -> list[tf.Variable]:
        """Trace the step, and read from its graph which variables it has, and which it assigns by itself."""
        kind = _kind(tensors)
        self._graphs = {kind: concrete(self._train_step, *kind)}
        graph = self._graphs[kind]
        self._variables = _distinct([*self._variables, *self.model.variables, *read_in(graph)])
        calls = (call for call in self._means.calls if call.graph is graph.graph)
        assigned = {id(v) for v in assigned_in(graph, without=(i for c in calls for i in c.operations))}
        return [v for v in self._variables if id(v) in assigned]

    def _rehearse(self, tensors: list[tf.Tensor]) -> list[tf.Variable]:
        """Run the step without a ring and without its optimizers, and put back what it has changed.

        Code that is never traced shows only which variables it has, not which ones it assigns: all that are
        not an optimizer's may be.
        """
        self._variables = _distinct([*self._variables, *attributes_of(self.model).values()])
        before = [(v, v.read_value()) for v in self._variables]

        def create(create_next: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
            v = create_next(**options)
            before.append((v, v.read_value()))
            return v

        for v in metric_variables(self.model):  # so that what metrics give differs from what they are given
            if keras.backend.is_float_dtype(v.dtype):
                v.assign(v + 1)
        with tf.variable_creator_scope(create):
            self._train_step(*tensors, rehearsing=True)
        for metric in metrics_of(self.model):
            metric.reset_state()
        for v, value in before:
            v.assign(value)
        self._means.expected = [call.length for call in self._means.calls]
        self._variables = _distinct([*(v for v, _ in before), *self._means.theirs])
        theirs = {id(v) for v in _distinct(self._means.theirs)}
        return [v for v in self._variables if id(v) not in theirs]

    def _try(self, sample: Batch, inexact: Inexact) -> None:
        """Find out, with real records, whether a ring makes the steps that Keras would.

        Raises:
            ModelError: it does not, and that is to be refused.
        """
        try:
            found = try_own_step(
                self._alone, lambda: [c.optimizer for c in self._means.calls], sample, is_half(self.model)
            )
        except Exception as error:
            inexact.warn(
                "whether a ring trains this model as Keras alone would could not be tried out: "
                f"{self._name} run eagerly, on {len(sample)} records, raised {type(error).__name__}: {error}"
            )
            return
        if found.added_up:
            self._means.added_up = found.added_up
            self._graphs.clear()  # they sum rows otherwise
        if not any(is_generator(v) for v in self._variables):  # draws for a record what depends on the others
            inexact.told(found.mixed, found.summed)

    def _alone(self, leaves: list[Any], records: int, totals: list[np.ndarray] | None) -> Run:
        """A step without a ring, for what it contributes to its sums. Changes nothing."""
        sums: list[np.ndarray] = []

        def reduce(vector: Vector) -> Vector:
            sums.append(np.asarray(vector))
            return vector if totals is None else tf.constant(totals[len(sums) - 1])

        expected, self._means.expected, self._means.by_row = self._means.expected, None, False
        self._before = self._begin(np.float32(records), np.zeros(2, np.int64))
        try:
            with self._means.sum.made_by(reduce):
                self._train_step(*map(arrays.tensor, leaves))
            before = self._touched_before()
            floats = [(v, b) for v, b in zip(self._assigned, before, strict=False) if v.dtype.is_floating]
            changes = [_change(v, b).numpy() * records for v, b in floats]
        finally:
            self._means.expected, self._means.by_row = expected, True
            self._put_back()
        looked_up = [n for n in self._means.rows if n is not None]
        return Run(sums, np.concatenate([*changes, np.zeros(0, np.float32)]), looked_up)

    # --- the graphs around a step

    def _begin_graph(self, records: tf.Tensor, draw: tf.Tensor) -> list[tf.Tensor]:
        before = [v.read_value() for v in self._variables]
        self._means.begin(records, draw[1])
        for v in self._variables:
            if _is_seed(v):
                v.assign_add(_salt(v, draw))
        for metric in metrics_of(self.model):
            metric.reset_state()
        return before

    def _collect_graph(self, contribution: tf.Tensor, losses: tf.Tensor, *before: tf.Tensor) -> tf.Tensor:
        records = self._means.records.read_value()
        changes = [_change(v, b) for v, b in zip(self._assigned, before, strict=False)]
        ours = tf.concat([*changes, losses], 0)
        ours = tf.where(records > 0, ours * records, tf.zeros_like(ours))
        at_fault = self._means.not_finite.read_value() + self._means.fault_of(ours)
        at = self._losses.index("loss") if "loss" in self._losses else 0
        loss = ours[self.length - self._size + sum(map(math.prod, self._shapes[:at]))]
        said = contribution[control.LEAVE : control.LOSS]
        return tf.concat([ours, [records], said, [loss, at_fault]], 0)

    def _accept_graph(self, total: tf.Tensor, ours: tf.Tensor, *before: tf.Tensor) -> tf.Tensor:
        """Whether each assigned variable has changed as on the other ranks, as far as it should; bool [n]."""
        equal = []
        records = [vector[self.length + control.RECORDS] for vector in (total, ours)]
        means = [
            tf.split(tf.math.divide_no_nan(v[: self.length], n), self._sizes)
            for v, n in zip((total, ours), records, strict=True)
        ]
        for v, b, mean, own in zip(self._assigned, before, *means, strict=False):
            wide, whole = _wide(v), not v.dtype.is_floating
            mean, own = (tf.round(mean), tf.round(own)) if whole else (mean, mean)
            equal.append(tf.reduce_all((mean == own) | (records[1] == 0)))
            v.assign(tf.cast(tf.cast(b, wide) + tf.reshape(tf.cast(mean, wide), v.shape), v.dtype))
        losses = total[self.length - self._size : self.length]
        sums = self._told[: self._size + 1] + tf.cast(tf.concat([losses, [records[0]]], 0), tf.float64)
        self._told.assign(tf.concat([sums, tf.cast(losses / records[0], tf.float64)], 0))
        for i, b in zip(self._touched[len(self._assigned) :], before[len(self._assigned) :], strict=True):
            self._variables[i].assign(b)
        return tf.stack(equal or [tf.constant(True)])

    def _restore_graph(self, *values: tf.Tensor) -> None:
        for v, value in zip(self._variables, values, strict=True):
            v.assign(value)


# Odd constants, so that (step, rank) spreads over the words of a seed.
_SALTS = np.array([2654435761, 2246822519], np.int64)
_SEEDS = 1 << 31


def _is_seed(v: tf.Variable) -> bool:
    """Keras' seeds, and the state of a tf.random.Generator."""
    name = v.name.rpartition("/")[2].partition(":")[0]
    return is_generator(v) or (name == "seed_generator_state" and v.dtype.is_integer)


def _salt(v: tf.Variable, draw: tf.Tensor) -> tf.Tensor:
    words = draw * _SALTS % _SEEDS
    return tf.cast(words if v.shape == [2] else tf.broadcast_to(tf.reduce_sum(words), v.shape), v.dtype)


def _distinct(variables: Iterable[Any], without: Iterable[Any] = ()) -> list[tf.Variable]:
    """As TensorFlow's variables, each once, in the order given."""
    return [plain(v) for v in distinct(variables, without)]


def _wide(v: tf.Variable) -> tf.DType:
    """A type in which changes of the variable can be computed."""
    return tf.float32 if v.dtype.is_floating and v.dtype.size <= 4 else tf.float64


def _change(v: tf.Variable, before: tf.Tensor) -> tf.Tensor:
    wide = _wide(v)
    return tf.reshape(tf.cast(tf.cast(v, wide) - tf.cast(before, wide), tf.float32), [-1])


def _tensors(batch: Batch) -> list[Any]:
    """The batch's arrays in a fixed order, in the types that Keras would give the model."""
    if batch.tensors is not None:
        return list(batch.tensors)
    leaves = keras.tree.flatten((batch.x, batch.y, batch.weights))
    return [arrays.tensor(arrays.standard(a)) for a in leaves if a is not None]


def _kind(tensors: list[Any]) -> tuple[tf.TypeSpec, ...]:
    return tuple(map(arrays.spec, tensors))
