# SPDX-License-Identifier: Apache-2.0
"""Warm start: begin a new training with the weights of an earlier training.

`initFrom.path` names the checkpoints of an earlier training, one of its checkpoints, a file saved by Keras,
or checkpoints of ElasticDL. `initFrom.state` selects the weights (with moving averages; the optimizer starts
afresh), or everything. The job counts its own records from the first one, independently of the source's.

Only the root of a training's first ring reads the source, once. It first checks every variable; if a variable
does not fit, nothing is changed.

A job that evaluates or predicts loads the rows of a job with parameter servers as variables. Every worker
reads their number when it builds the model (`source.saved_counts`). In a training whose rows are on servers,
the servers themselves read the rows from the earlier checkpoint. Rows that are variables there, or that a
file holds, are sent to the servers. The names of their layers identify the tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np

from edl.checkpoints import Checkpoint, CheckpointError, Tensor, one_of
from edl.checkpoints.keras_files import is_keras_file, is_of_keras_2
from edl.config import Config
from edl.errors import ModelError
from edl.layers.embedding import Embedding
from edl.trainer.agreement.epochs import without_memory
from edl.trainer.checkpoint.comparison import (
    compare_file,
    kind_of,
    refuse_rows,
    refuse_variables,
)
from edl.trainer.checkpoint.interfaces import ForeignWeights
from edl.trainer.checkpoint.source import foreign, local_file, place_of, rows_variable
from edl.trainer.embedding.interfaces import Start, Table
from edl.trainer.embedding.saved_rows import counted, dims, dims_in_file, tables
from edl.trainer.model import snapshot
from edl.trainer.model.state_owner import StateOwner
from edl.trainer.runtime.error_report import format_error
from edl.trainer.runtime.log import log

AVERAGE = "_average"  # how Keras ends the name of a weight's average in an optimizer
TRAINING = "training"
WORK = {"evaluate": "evaluation", "predict": "prediction"}  # of the modes that do not train


class Servers(Protocol):
    """Servers of the tables' rows."""

    def begin_with(self, start: Start) -> None:
        """Use these rows as the initial rows at the next restore of step 0."""
        ...


class Learner(StateOwner, Protocol):
    """The part of a learner that a warm start replaces."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables whose rows are on servers."""
        ...

    def take_metrics(self) -> Mapping[str, Any]:
        """Return the metrics and reset them."""
        ...


@dataclass(frozen=True)
class WarmStart:
    """The warm start of a job.

    Args:
        where: `initFrom.path`.
        everything: optimizer included.
        tell: takes a line about what has been taken over.
        work: what begins with it: the training.
        servers: the servers with the rows of the learner's tables; None if it has no tables.
    """

    where: str
    everything: bool
    model: keras.Model
    learner: Learner
    tell: Callable[[str], None]
    work: str = TRAINING
    servers: Servers | None = None

    def check(self) -> None:
        """Check that the checkpoint exists and fits. Changes nothing, and reads no more than necessary.

        Raises:
            ConfigError: there is no such file or checkpoint.
            ModelError: it does not fit the model; the text names the variables.
            CheckpointError: it cannot be read.
        """
        if is_keras_file(self.where):
            with local_file(self.where) as path:
                self._compare_file(path)
        elif weights := foreign(self.where):
            self._of_foreign(weights)
        else:
            self._compare(one_of(self.where))

    def begin(self) -> None:
        """Load the checkpoint into the learner and its servers.

        Raises as `check` does, and changes nothing then.
        """
        if is_keras_file(self.where):
            what = self._take_file()
        elif weights := foreign(self.where):
            what = self._take_foreign(weights)
        else:
            what = self._take_checkpoint()
        if self.everything:
            self.learner.take_metrics()  # what it had counted of an epoch that was not over
        self.tell(f"the {self.work} begins with {what}")

    # --- from a checkpoint

    def _take_checkpoint(self) -> str:
        found = one_of(self.where, log.warning)
        manifest, layers = found.manifest, self._with_rows(found)
        self._compare(found)
        there = found.read()
        start = self._start(found, there)
        values = {name: np.frombuffer(tensor.data, np.uint8) for name, tensor in there.items()}
        values.update(self._rows(found, layers))
        names = self._renamed(values) | self._averages(values)
        parts = [
            values[names.get(d.name, d.name)] if self.everything or d.of_model else part
            for d, part in zip(self.learner.variable_specs(), self.learner.parts(), strict=True)
        ]
        self.learner.take_over(self.learner.prepared(parts))
        if start is not None and self.servers is not None:
            self.servers.begin_with(start)
        what = "all" if self.everything else "the weights"
        return f"{what} of the checkpoint of step {manifest.step:,} of run {manifest.run} in {self.where}"

    def _renamed(self, there: Collection[str]) -> dict[str, str]:
        """Map names of weights here to their names there.

        A name begins with the calls during which the weight was made. The model is one of these calls, unless
        a train_step() of its own calls only the model's layers.
        """
        here = {d.name for d in self.learner.variable_specs() if d.of_model}
        new = [name for name in there if name not in here]
        found: dict[str, str] = {}
        for name in here.difference(there):
            alike = [other for other in new if name.endswith(f"/{other}") or other.endswith(f"/{name}")]
            if len(alike) == 1:
                found[name] = alike[0]
        return found if len(set(found.values())) == len(found) else {}

    def _averages(self, there: Mapping[str, np.ndarray]) -> dict[str, str]:
        """Map names of weights to those of their averages (`use_ema`).

        An inference loads the averages instead of the weights, as `fit` would at its end.

        Raises:
            ModelError: the averages there have other names than this model's.
        """
        optimizer: Any = getattr(self.model, "optimizer", None)  # what only predicts need not be compiled
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        if self.work == TRAINING or not getattr(optimizer, "use_ema", False):
            return {}
        trained = self.model.trainable_variables
        optimizer.build(trained)
        names = [weight.name for weight in snapshot.variable_specs(trained, self.model)]
        renamed, found = self._renamed(there), dict[str, str]()
        for name, average in zip(names, optimizer._model_variables_moving_average, strict=True):
            if average.path in there:
                found[name] = average.path
            elif name in renamed:  # as Keras names what belongs to a weight
                ending = f"/{renamed[name].replace('/', '_')}{AVERAGE}"
                alike = [other for other in there if other.endswith(ending)]
                if len(alike) == 1:
                    found[name] = alike[0]
        if not found and (others := self._other_averages(there, renamed)):
            ours = optimizer._model_variables_moving_average[0].path
            raise ModelError(
                f"initFrom.path: the averages of the weights (use_ema) in {self.where} have other names "
                f"than those of this model: {others[0]} there, {ours} here. Without them, the weights would "
                "be others than those of the trained model"
            )
        return found

    def _other_averages(self, there: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """The names of those that an optimizer has kept."""
        of_model = {renamed.get(d.name, d.name) for d in self.learner.variable_specs() if d.of_model}
        return sorted(name for name in there if name.endswith(AVERAGE) and name not in of_model)

    def _start(self, checkpoint: Checkpoint, there: Mapping[str, Tensor]) -> Start | None:
        """The rows that the servers begin with."""
        if not self.learner.tables:
            return None
        on_servers, rows = dims(checkpoint), dict[int, tuple[np.ndarray, np.ndarray]]()
        for number, (table, layer) in enumerate(self._tables()):
            if table.name not in on_servers:
                values = np.frombuffer(there[rows_variable(layer)].data, np.float32).reshape(-1, table.dim)
                rows[number] = np.arange(len(values)), values
        taken = tuple(table.name for table in self.learner.tables if table.name in on_servers)
        directory = self.where.rstrip("/").removesuffix(f"/{checkpoint.directory}")
        if "://" not in directory:
            directory = str(Path(directory).absolute())
        return Start(directory, checkpoint.step, checkpoint.attempt, self.everything, taken, rows)

    def _tables(self) -> list[tuple[Table, Embedding]]:
        """Return the tables whose rows are on servers, with their layers."""
        layers = {
            layer.name: layer
            for layer in self.model._flatten_layers()
            if isinstance(layer, Embedding) and layer.on_servers
        }
        return [(table, layers[table.name]) for table in self.learner.tables]

    def _compare_tables(self, checkpoint: Checkpoint) -> None:
        """Compare the tables with those of the checkpoint.

        Raises:
            ModelError: the rows of a table are not there, or others.
        """
        if not self.learner.tables:
            return
        place, on_servers = place_of(checkpoint.manifest, self.where), dims(checkpoint)
        variables = {v.name: (v.dtype, v.shape) for v in checkpoint.manifest.variables}
        for table, layer in self._tables():
            dtype, shape = variables.get(rows_variable(layer), ("", ()))
            is_variable = table.name not in on_servers and dtype == "float32" and len(shape) == 2
            dim = shape[1] if is_variable else on_servers.get(table.name)
            refuse_rows(place, table, dim)
            if is_variable and self.everything:
                raise ModelError(
                    f"{place} has the rows of {table.name!r} as a variable (mode=train), with what the "
                    "optimizer keeps for all of them: that cannot be brought to servers. With "
                    "initFrom.state=weights the rows can, and the optimizer begins anew"
                )

    def _with_rows(self, checkpoint: Checkpoint) -> list[Embedding]:
        """The layers whose rows are in its servers' parts."""
        names = counted(checkpoint)
        return [
            layer
            for layer in self.model._flatten_layers()
            if isinstance(layer, Embedding) and layer.ids is not None and layer.name in names
        ]

    def _rows(self, checkpoint: Checkpoint, layers: Sequence[Embedding]) -> dict[str, np.ndarray]:
        """The values of these layers' variables, uint8 [bytes], by the names of the variables.

        Raises:
            ModelError: other rows are there than the model was built for.
        """
        there, found = tables(checkpoint) if layers else {}, dict[str, np.ndarray]()
        for layer in layers:
            table, ours = there[layer.name], (layer.vocabulary, layer.dim)
            if table.rows.shape != ours:
                place = place_of(checkpoint.manifest, self.where)
                raise ModelError(
                    f"{place} has {list(table.rows.shape)} rows (how many, "
                    f"of what length) of layer {layer.name!r}, and the model was built for {list(ours)}. If "
                    "checkpoints are still being written there, name one of them: DIR/step-..."
                )
            order = np.argsort(table.ids)
            assert layer.ids is not None and layer.embeddings is not None
            for variable, value in ((layer.ids, table.ids), (layer.embeddings, table.rows)):
                found[variable.path] = np.ascontiguousarray(value[order]).reshape(-1).view(np.uint8)
        return found

    def _compare(self, checkpoint: Checkpoint) -> None:
        """Compare the checkpoint's variables with the model's.

        Raises:
            ModelError: the checkpoint does not fit the model.
        """
        manifest, layers = checkpoint.manifest, self._with_rows(checkpoint)
        self._compare_tables(checkpoint)
        elsewhere = {v.path for layer in layers for v in (layer.ids, layer.embeddings) if v is not None}
        there = {v.name: (v.dtype, v.shape) for v in without_memory(manifest)}
        ours = [d for d in self.learner.variable_specs() if self.everything or d.of_model]
        names = self._renamed(there)
        here = {names.get(d.name, d.name): (d.dtype, d.shape) for d in ours if d.name not in elsewhere}
        place = place_of(manifest, self.where)
        refuse_variables(place, {n: kind_of(*here[n]) for n in here}, {n: kind_of(*there[n]) for n in there})
        # With rows as variables it is made in another way than where they are on servers.
        if self.everything and not layers and manifest.model != self.learner.fingerprint():
            raise ModelError(
                f"{place} is of another model: its layers, loss or optimizer differ from those of this one. "
                "With initFrom.state=weights the optimizer begins anew"
            )

    # --- from a different system

    def _take_foreign(self, weights: ForeignWeights) -> str:
        parts, rows = self._of_foreign(weights)
        self.learner.take_over(self.learner.prepared(parts))
        if self.servers is not None:
            self.servers.begin_with(Start(rows=rows))
        return f"the weights of {weights.name} in {self.where}"

    def _of_foreign(
        self, weights: ForeignWeights
    ) -> tuple[list[np.ndarray], Mapping[int, tuple[np.ndarray, np.ndarray]]]:
        """Fit them to the model.

        Raises:
            ModelError: they do not fit, or all of the state is wanted.
        """
        place = f"initFrom.path: {weights.name} in {self.where}"
        if self.everything:
            raise ModelError(f"{place} has no state of an optimizer: set initFrom.state=weights")
        return weights.fitted(place, self.model, self.learner, self._tables())

    # --- from a file of Keras

    def _take_file(self) -> str:
        before, rows = self.learner.parts(), dict[int, tuple[np.ndarray, np.ndarray]]()
        with local_file(self.where) as path:
            converted = self._compare_file(path)
            try:
                with warnings.catch_warnings():  # of the optimizer's part, which is not wanted anyway
                    warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
                    with self._collecting(rows):
                        self.model.load_weights(path)
                taken, error = self.learner.parts(), None
            except Exception as raised:  # Keras and h5py raise many types for a damaged file
                taken, error = before, raised
        # Keras loads the optimizer, too, or a part of what a damaged file has.
        parts = [
            new if d.of_model else old
            for d, old, new in zip(self.learner.variable_specs(), before, taken, strict=True)
        ]
        self.learner.take_over(self.learner.prepared(parts))
        if error is not None:
            raise CheckpointError(f"initFrom.path: {self.where}: {format_error(error)}") from error
        if self.servers is not None:
            self.servers.begin_with(Start(rows=rows))
        return f"the weights of {self.where}" + (
            f", converted from {', '.join(converted)}" if converted else ""
        )

    @contextmanager
    def _collecting(self, rows: dict[int, tuple[np.ndarray, np.ndarray]]) -> Iterator[None]:
        """Inside this context, rows that are loaded into layers with rows on servers are collected."""

        def collect(number: int, values: list[np.ndarray]) -> None:
            *ids, found = values
            rows[number] = (ids[0] if ids else np.arange(len(found))), found.astype(np.float32)

        layers = [layer for _, layer in self._tables()]
        try:
            for number, layer in enumerate(layers):
                layer.loader = partial(collect, number)
            yield
        finally:
            for layer in layers:
                layer.loader = None

    def _compare_file(self, path: Path) -> list[str]:
        """Compare a file's variables with the model's. Return the dtypes that are converted."""
        place = f"initFrom.path: {self.where}"
        if self.learner.tables:
            dims = {} if is_of_keras_2(path.name) else dims_in_file(path)  # it has no rows for servers
            for table in self.learner.tables:
                refuse_rows(place, table, dims.get(table.name))
        return compare_file(place, path, self.model)


def of_job(
    config: Config,
    model: keras.Model,
    learner: Learner,
    tell: Callable[[str], None],
    servers: Servers | None = None,
) -> WarmStart | None:
    """Return the warm start of a job; None if it begins with what model() returns."""
    source = config.init_from
    if not source.path:
        return None
    # Servers of a model that is not trained keep nothing but rows.
    everything = source.state == "everything" and (config.trains or servers is None)
    work = WORK.get(config.mode, TRAINING)
    return WarmStart(source.path, everything, model, learner, tell, work, servers)
