# SPDX-License-Identifier: Apache-2.0
"""The weights in a checkpoint of ElasticDL, for a warm start (`edl.trainer.checkpoint`).

A file holds weights by name and rows of embedding tables by id. It holds no state of an optimizer and no
moving averages. ElasticDL's Keras numbered layers by their creation, and so does Keras 3, but it may begin
elsewhere: `dense_2/kernel:0` there may be `dense/kernel` here. So weights whose names differ in such numbers
only are matched in the order of their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from edl.compat.elasticdl.checkpoint_files import ServerFile
from edl.contract.proto import elasticdl_pb2 as pb
from edl.errors import CheckpointError, ModelError
from edl.trainer.checkpoint.comparison import refuse_rows, refuse_variables
from edl.trainer.checkpoint.source import rows_variable
from edl.trainer.embedding.interfaces import Table
from edl.trainer.model.state_owner import StateOwner
from edl.trainer.model.variable_spec import VariableSpec

_NUMBER = re.compile(r"_([0-9]{1,9})$")


@dataclass(frozen=True)
class Stored:
    """The contents of a checkpoint.

    Args:
        version: of the model: the updates that it had seen.
        dense: the weights by their names, without the `:0` of TensorFlow.
        tables: the rows of embedding layers by the names of the layers: ids, int64 [rows], and values,
            float32 [rows, dim].
    """

    version: int
    dense: Mapping[str, np.ndarray]
    tables: Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Weights:
    """The weights in the files of all servers, which are read when they are first used."""

    files: Sequence[ServerFile]

    @cached_property
    def stored(self) -> Stored:
        """The contents of the files.

        Raises:
            CheckpointError: a file cannot be read, or is damaged.
        """
        return read(self.files)

    @property
    def name(self) -> str:
        """The version, for messages."""
        return f"version {self.stored.version:,} of ElasticDL"

    def fitted(
        self, place: str, model: Any, learner: StateOwner, tables: Sequence[tuple[Table, Any]]
    ) -> tuple[list[np.ndarray], Mapping[int, tuple[np.ndarray, np.ndarray]]]:
        """Return the learner's parts with these weights, and the rows of the tables by their numbers.

        Raises:
            ModelError: they do not fit the model.
        """
        stored, on_servers = self.stored, {layer.name for _, layer in tables}
        embeddings = [layer for layer in model._flatten_layers() if hasattr(layer, "embeddings")]
        there = matched([layer.name for layer in embeddings], stored.tables)
        rows = dict[int, tuple[np.ndarray, np.ndarray]]()
        for number, (table, layer) in enumerate(tables):
            found = stored.tables.get(there.get(layer.name, ""))
            refuse_rows(place, table, None if found is None else found[1].shape[1])
            assert found is not None
            rows[number] = found
        variables = {
            rows_variable(layer): there[layer.name]
            for layer in embeddings
            if layer.name in there and layer.name not in on_servers
        }
        trained = {v.path for v in model.trainable_variables}
        specs = [d for d in learner.variable_specs() if d.of_model]
        dense = matched([d.name for d in specs if d.name not in variables], stored.dense)
        refuse_variables(
            place,
            {d.name: str([*d.shape]) for d in specs if d.name in dense or d.name in trained - {*variables}},
            {name: str([*stored.dense[other].shape]) for name, other in dense.items()},
        )
        parts = []
        for d, part in zip(learner.variable_specs(), learner.parts(), strict=True):
            if d.of_model and d.name in variables:
                part = with_rows(place, d, part, *stored.tables[variables[d.name]])
            elif d.of_model and d.name in dense:
                value = stored.dense[dense[d.name]].astype(d.dtype)
                part = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            parts.append(part)
        return parts, rows


def read(files: Sequence[ServerFile]) -> Stored:
    """Read the files of all servers.

    Raises:
        CheckpointError: a file cannot be read, or is damaged.
    """
    version, dense = 0, dict[str, np.ndarray]()
    rows: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for file in files:
        data = file.read()
        try:
            model = pb.Model.FromString(data)
            version = max(version, model.version)
            for name, tensor in model.dense.items():
                dense[name.removesuffix(":0")] = _array(tensor)
            for name, table in model.tables.items():
                ids, values = np.array(table.ids, np.int64), _array(table.tensor).astype(np.float32)
                rows.setdefault(name, []).append((ids, values))
        except Exception as error:  # protobuf and TensorFlow raise many types for a damaged message
            raise CheckpointError(f"{file}: damaged checkpoint of ElasticDL: {error}") from error
    tables = {}
    for name, parts in rows.items():
        if any(
            values.shape != (len(ids), *parts[0][1].shape[1:]) or values.ndim != 2 for ids, values in parts
        ):
            shapes = [(len(ids), *values.shape) for ids, values in parts]
            raise CheckpointError(
                f"{files[0]} and others: table {name}: expected one id and one row each, all rows of one "
                f"length, found by file (ids, rows, length): {shapes}"
            )
        tables[name] = np.concatenate([i for i, _ in parts]), np.concatenate([v for _, v in parts])
    return Stored(version, dense, tables)


def with_rows(
    place: str, spec: VariableSpec, part: np.ndarray, ids: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Return the bytes of a variable of rows with these rows; other rows stay as they are.

    Raises:
        ModelError: the variable has no such rows.
    """
    size, dim = spec.shape
    if len(ids) and (values.shape[1] != dim or ids.min() < 0 or ids.max() >= size):
        raise ModelError(
            f"{place} does not fit this model: {spec.name} is {[size, dim]} here, and rows {ids.min()} to "
            f"{ids.max()} of length {values.shape[1]} there"
        )
    table = part.view(spec.dtype).reshape(size, dim).copy()
    table[ids] = values
    return table.reshape(-1).view(np.uint8)


def _array(tensor: bytes) -> np.ndarray:
    return np.asarray(tf.make_ndarray(tensor_pb2.TensorProto.FromString(tensor)))


def matched(here: Iterable[str], there: Iterable[str]) -> dict[str, str]:
    """Map names here to names there, which may differ in the numbers that Keras gives to layers.

    Names are only matched if both sides have as many names that differ in nothing else.
    """
    ours, theirs = _grouped(here), _grouped(there)
    return {
        name: other
        for group, names in ours.items()
        if len(names) == len(others := theirs.get(group, []))
        for name, other in zip(names, others, strict=True)
    }


def _grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """The names by what they are without numbers, in the order of these numbers."""
    found: dict[str, list[tuple[list[int], str]]] = {}
    for name in names:
        parts = name.split("/")
        numbers = [int(number[1]) if (number := _NUMBER.search(part)) else 0 for part in parts]
        group = "/".join(_NUMBER.sub("", part) for part in parts)
        found.setdefault(group, []).append((numbers, name))
    return {group: [name for _, name in sorted(numbered)] for group, numbered in found.items()}
