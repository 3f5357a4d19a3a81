# SPDX-License-Identifier: Apache-2.0
"""The types of a job's batches: which arrays they have, and for what a graph is traced to take them all.

The first batch says which arrays there are. Where others differ from it in a length, the type covers any
length. A batch of another type than those before is compared and never misread: either there is a type for
both, or it is refused in words.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from edl.errors import DataError
from edl.trainer.records import arrays
from edl.trainer.records.batches import Batch


class BatchTypes:
    """The types and shapes of a model's batches.

    Args:
        first: says which arrays each batch has.
        others: further batches, to be covered too.

    Raises:
        DataError: no graph could be for all of them.
    """

    def __init__(self, first: Batch, others: Sequence[Batch] = ()):
        self._structure = _tree(first)
        self._specs = self._first = _specs(first)
        self._known: list[tuple[Any, ...]] = []  # types of batches that need no comparison any more
        for batch in (first, *others):
            self.widen(batch)

    @property
    def signature(self) -> list[tf.TensorSpec]:
        """The signature of `tensors`."""
        return list(tf.nest.flatten(self._specs, expand_composites=True))

    def know(self, batch: Batch) -> bool:
        """Whether one like it has been compared. Cheap: it is asked for each batch."""
        return _type(_tree(batch)) in self._known

    def widen(self, batch: Batch) -> bool:
        """Cover this batch too: whether a graph for the batches before it does not.

        Raises:
            DataError: no graph could be for it and those before it.
        """
        tree = _tree(batch)
        names, expected = _names(tree), _names(self._structure)
        if names != expected:
            raise DataError(
                f"the batch of {batch} has the arrays {', '.join(names)}, but the first had "
                f"{', '.join(expected)}; all batches must have the same"
            )
        specs = []
        for name, traced, leaf in zip(names, self._specs, leaves(batch), strict=True):
            wider = arrays.wider(traced, leaf)
            if isinstance(wider, str):
                raise DataError(f"the batch of {batch}: {name} {wider}")
            specs.append(wider)
        before, self._specs = self._specs, specs
        self._known.append(_type(tree))
        return before != specs

    def differs_from_the_first(self, batch: Batch) -> bool:
        """True if the batch's shapes or types are not those of the first records."""
        return _specs(batch) != self._first

    def tensors(self, batch: Batch) -> list[Any]:
        """The arguments of a graph: the arrays, and the component tensors of ragged and sparse ones."""
        found = leaves(batch)
        if any(isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) for leaf in found):
            return list(tf.nest.flatten(found, expand_composites=True))
        return found

    def packed(self, tensors: Sequence[tf.Tensor]) -> list[Any]:
        """The leaves whose `tensors` these are."""
        return list(tf.nest.pack_sequence_as(self._specs, list(tensors), expand_composites=True))

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Put flat tensors back into the structure of features, labels and weights."""
        return unflattened(self._structure, map(arrays.tensor, leaves))


def leaves(batch: Batch) -> list[Any]:
    """The arrays in a fixed order, in the types that Keras would give the model."""
    return [arrays.standard(a) for a in keras.tree.flatten(_tree(batch)) if a is not None]


def _specs(batch: Batch) -> list[tf.TypeSpec]:
    return [arrays.spec(leaf) for leaf in leaves(batch)]


def tensor_tree(batch: Batch) -> Any:
    """Return features, labels and weights as tensors, in the batch's own structure."""
    return unflattened(_tree(batch), map(arrays.tensor, leaves(batch)))


def divided(batch: Batch, pieces: int) -> list[Batch]:
    """The batch in so many pieces, or as many as it has records."""
    count = min(pieces, len(batch))
    return _cut(batch, [len(batch) * nth // count for nth in range(count + 1)])


def in_blocks(batch: Batch, blocks: int) -> tuple[int, list[Batch]]:
    """The blocks of a step that the batch consists of, and the number of the first one."""
    begin, edges = batch.block_edges(blocks)
    return begin, _cut(batch, edges)


def _cut(batch: Batch, edges: Sequence[int]) -> list[Batch]:
    if len(edges) <= 2:
        return [batch]
    found = []
    for start, stop in itertools.pairwise(edges):
        of = lambda a, i=start, j=stop: None if a is None else arrays.cut(a, i, j)  # noqa: E731
        x, y, weights = keras.tree.map_structure(of, _tree(batch))
        found.append(Batch(batch.indices[start:stop], x, y, weights))
    return found


def unflattened(structure: Any, leaves: Iterator[Any]) -> Any:
    """Put `leaves` back into the shape of `structure`, in keras.tree.flatten()'s order. None stays None."""
    return keras.tree.map_structure(lambda a: None if a is None else next(leaves), structure)


def _tree(batch: Batch) -> Any:
    return batch.x, batch.y, batch.weights


def _type(tree: Any) -> tuple[Any, ...]:
    """Equal for batches that one graph takes without a comparison. Cheap: it is made of each batch."""
    if isinstance(tree, dict):
        return ("dict", *((key, _type(tree[key])) for key in sorted(tree)))
    if isinstance(tree, list | tuple):
        return ("list", *map(_type, tree))
    return () if tree is None else arrays.key(tree)


def _names(tree: Any) -> list[str]:
    """The names of the leaves, as the user knows them."""
    found = []
    for path, leaf in keras.tree.flatten_with_path(tree):
        if leaf is not None:
            inside = "".join(f"[{key!r}]" for key in path[1:])
            found.append(("features", "labels", "weights")[path[0]] + inside)
    return found
