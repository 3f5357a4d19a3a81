# SPDX-License-Identifier: Apache-2.0
"""The two runs of a forward pass whose rows are on servers: one up to the ids, one with their rows.

The first run is recorded (`Recorder`): it returns zeros for rows. The second is given the rows (`Given`), as
inputs of its graph, so that they have gradients. Both request rows in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from edl.layers.embedding import Embedding
from edl.layers.row_location import rows_from


class Layers(Protocol):
    """The layers of a model whose rows are on servers."""

    @property
    def layers(self) -> Sequence[Embedding]:
        """The layers, by the number of their table."""
        ...

    def number(self, layer: Embedding) -> int:
        """Return the number of the layer's table.

        Raises:
            ModelError: the layer is not one of these.
        """
        ...


@dataclass
class _Site:
    """A place in the forward pass that asks for rows."""

    table: int
    ids: tf.Tensor


class Recorder:
    """Records the ids that a forward pass looks up, and returns zeros for their rows."""

    def __init__(self, lookups: Layers):
        self._lookups, self._sites, self._zeros = lookups, list[_Site](), set[str]()
        self.rows: list[tf.Tensor] = []
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    @contextmanager
    def looked_up(self) -> Iterator[None]:
        """Run the forward pass inside this context; its lookups are recorded."""
        with rows_from(self._rows):
            yield

    def _rows(self, layer: Embedding, ids: tf.Tensor) -> tf.Tensor:
        number = self._lookups.number(layer)
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if graph is not self._graph:
            raise ModelError(
                f"layer {layer.name!r} is called in a function, loop or branch of TensorFlow (tf.function, "
                "tf.while_loop, tf.cond): its rows are on servers, and its ids must be known before the "
                "step. Call it outside"
            )
        self._sites.append(_Site(number, ids))
        zeros = tf.zeros([tf.size(ids), layer.dim])
        if graph is None:
            return zeros
        # An operation that is found again, if ids depend on it.
        zeros = tf.raw_ops.PlaceholderWithDefault(input=zeros, shape=[None, layer.dim])
        self._zeros.add(zeros.op.name)
        return zeros

    def unique(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return the unique ids of each table, int64 [n], and for each requested id its index among them.

        Raises:
            ModelError: ids depend on rows.
        """
        ids, places = [], []
        for number, layer in enumerate(self._lookups.layers):
            sites = [site.ids for site in self._sites if site.table == number]
            if self._graph is not None and self._depend_on_rows(sites):
                raise ModelError(
                    f"the ids of layer {layer.name!r} depend on rows of an edl.layers.Embedding. Its rows "
                    "are on servers, and all ids of a step must be known before it"
                )
            flat = tf.concat(sites, 0) if sites else tf.zeros([0], tf.int64)
            of_table = tf.unique(flat)
            ids.append(of_table.y)
            places.append(of_table.idx)
        return ids, places

    def _depend_on_rows(self, tensors: list[tf.Tensor]) -> bool:
        seen: set[str] = set()
        waiting = [t.op for t in tensors]
        while waiting:
            op = waiting.pop()
            if op.name in seen:
                continue
            seen.add(op.name)
            if op.name in self._zeros:
                # How many there are is no value of a row.
                return True
            if op.type not in ("Shape", "Size", "Rank", "ShapeN"):
                waiting += [t.op for t in op.inputs]
        return False


class Given:
    """Rows of the ids that a `Recorder` of the same forward pass has recorded."""

    def __init__(
        self,
        lookups: Layers,
        rows: list[tf.Tensor],
        places: list[tf.Tensor],
        ids: Sequence[np.ndarray] | None = None,
    ):
        self._lookups, self.rows, self._places, self._ids = lookups, rows, places, ids
        self._used: list[Any] = [0 for _ in rows]

    @contextmanager
    def looked_up(self) -> Iterator[None]:
        """Run the forward pass inside this context; its lookups get the rows."""
        with rows_from(self._rows):
            yield

    def _rows(self, layer: Embedding, ids: tf.Tensor) -> tf.Tensor:
        number = self._lookups.number(layer)
        start = self._used[number]
        count = tf.size(ids)
        self._used[number] = start + count
        places = self._places[number][start : start + count]
        if self._ids is not None and not np.array_equal(self._ids[number][places.numpy()], ids.numpy()):
            raise ModelError(
                f"the ids of layer {layer.name!r} are others in a second run of the same step: they depend "
                "on rows of an edl.layers.Embedding. All ids of a step must be known before it"
            )
        return tf.gather(self.rows[number], places)
