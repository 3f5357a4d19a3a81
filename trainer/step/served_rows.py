# SPDX-License-Identifier: Apache-2.0
"""The rows on servers, within a step: find their ids, pull them, stage their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from edl.trainer.embedding.interfaces import Commit
from edl.trainer.embedding.lookups import Lookups
from edl.trainer.records import arrays

Staged = list[tuple[np.ndarray, np.ndarray]]  # of each table on servers: ids, and the gradients of their rows


@dataclass(frozen=True, eq=False)
class _Found:
    """The ids that records look up.

    Args:
        tensors, draw: the inputs that the ids were found for.
        ids: the unique ids of each table.
        places: the positions in `ids` of all requested ids, int32 tensors.
    """

    tensors: list[Any]
    draw: np.ndarray
    ids: list[np.ndarray]
    places: Sequence[tf.Tensor]


class ServedRows:
    """The rows on servers that the steps of one model read.

    Args:
        lookups: the model's lookups of these rows.
        eager: whether the step runs eagerly, and checks that it looks up the ids that were found before.
    """

    def __init__(self, lookups: Lookups, eager: bool):
        self._lookups, self._eager = lookups, eager
        self._ahead: _Found | None = None
        self._graph: Callable[..., list[tf.Tensor]]

    def use(self, graph: Callable[..., list[tf.Tensor]]) -> None:
        """Set the function from a batch's tensors and a draw to the ids of each table and their places."""
        self._graph, self._ahead = graph, None

    def look_up(self, tensors: list[Any], draw: np.ndarray) -> None:
        """Find the ids of the next step's records; `inputs` and `begin_pull` use them."""
        self._ahead = None
        self._ahead = self._found(tensors, draw)

    def begin_pull(self, tensors: list[Any], step: int, last: Commit) -> None:
        """Request the rows of the ids that `look_up` found for these tensors."""
        if self._ahead is not None and self._ahead.tensors is tensors:
            self._lookups.begin_pull(step, self._ahead.ids, last)

    def inputs(
        self, tensors: list[Any], draw: np.ndarray, step: int | None, meanwhile: Callable[[], None]
    ) -> tuple[list[Any], list[np.ndarray]]:
        """Pull the rows that a batch looks up.

        Args:
            step: the step whose rows are pulled; None if the records contribute nothing, so zeros will do.
            meanwhile: is done while the servers send rows that were requested before.

        Returns:
            the step's inputs: the rows of each table, the places of all requested ids among them, and for
            an eager step the ids themselves; and the unique ids of each table, for `to_stage`.
        """
        found = self._found(tensors, draw)
        if step is None:
            pairs = zip(found.ids, self._lookups.tables, strict=True)
            rows = [np.zeros((len(ids), table.dim), np.float32) for ids, table in pairs]
        else:
            rows = self._lookups.pull(step, found.ids, meanwhile)
        return [*map(tf.constant, rows), *found.places, *(found.ids if self._eager else ())], found.ids

    def to_stage(self, ids: Sequence[np.ndarray], gradients: Sequence[tf.Tensor]) -> Staged:
        """Pair the gradients of rows with their ids, as `inputs` returned them.

        Rows that are not trained are sent to the servers, too: their initial values belong to the model.
        """
        learned = [layer.trainable for layer in self._lookups.layers]
        return [
            (some, np.asarray(g) if trained else np.zeros_like(g))
            for some, g, trained in zip(ids, gradients, learned, strict=True)
        ]

    def _found(self, tensors: list[Any], draw: np.ndarray) -> _Found:
        """The ids that some records look up; cached."""
        ahead = self._ahead
        if ahead is not None and ahead.tensors is tensors and np.array_equal(ahead.draw, draw):
            return ahead
        count = len(self._lookups.tables)
        found = self._graph(*map(arrays.tensor, tensors), tf.constant(draw))
        return _Found(tensors, draw, [some.numpy() for some in found[:count]], found[count:])
