# SPDX-License-Identifier: Apache-2.0
"""A reader over a tf.data pipeline whose records fit in memory.

Promise: all workers hold the same records in the same order, or the pipeline is refused. It is read twice,
and the digests of all batches must be equal. Random operations of TensorFlow are refused by name, because edl
seeds them: they would be drawn once, equally in both passes, and then be the same in each epoch. The master
compares the digest of all records between workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from edl.data.base import CONVERT, DOCS
from edl.data.nest import leaves, map_leaves
from edl.data.objects.in_memory import Arrays
from edl.data.same import digest_of
from edl.errors import DataError

MIB = 1 << 20
UNORDERED = (
    "from_tf: the pipeline has deterministic=False, so its order differs from run to run; leave it out, as "
    "workers must read the same records in the same order"
)
RANDOM = frozenset(
    {
        *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle"),
        *("ParameterizedTruncatedNormal", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "Multinomial"),
        *("RandomCrop", "SampleDistortedBoundingBox", "SampleDistortedBoundingBoxV2"),
        *("StatefulUniform", "StatefulUniformInt", "StatefulUniformFullInt", "StatefulStandardNormalV2"),
        *("StatefulTruncatedNormal", "StatefulRandomBinomial", "AnonymousRandomSeedGenerator"),
    }
)


def from_tf(dataset: Any, most_mebibytes: float = 2048) -> Arrays:
    """A reader over the records of a `tf.data.Dataset`, which are read into memory once, at the start.

    Each worker reads them by itself, so the pipeline must return the same records in the same order each
    time: no `shuffle` without `reshuffle_each_iteration=False` and a seed, no random augmentation, no
    `deterministic=False`. The job shuffles the records itself.

    Args:
        dataset: a dataset as for Keras' `fit`: each element is a batch of features, (features, labels) or
            (features, labels, weights). For a dataset of single records, pass `dataset.batch(1024)`.
        most_mebibytes: limit of the memory that the records take in each worker.

    Raises:
        DataError: the records take more memory, the pipeline is random or differs between two passes, an
            array is ragged, or the dataset has no end or no records.
    """
    if getattr(dataset, "cardinality", None) is None:
        raise DataError(f"from_tf: expected a tf.data.Dataset, not a {type(dataset).__name__}")
    if int(dataset.cardinality()) == -1:
        raise DataError("from_tf: the dataset has no end (repeat()); give it without repeat, or with take(n)")
    for path, spec in leaves(dataset.element_spec):
        if type(spec).__name__ == "RaggedTensorSpec":
            name = path or "the batch"
            raise DataError(f"from_tf: {name} is ragged; make it dense, as with padded_batch or to_tensor()")
    _refuse_random(dataset)
    batches: list[Any] = []
    size = 0
    for batch in dataset.as_numpy_iterator():
        for path, leaf in leaves(batch):
            if not isinstance(leaf, np.ndarray) or not leaf.shape:
                raise DataError(
                    f"from_tf: batch {len(batches)}: {path or 'the batch'} is a {type(leaf).__name__}; "
                    "expected an array with an entry for each record (dataset.batch(1024) makes batches of "
                    "single records)"
                )
            size += leaf.nbytes
        if size > most_mebibytes * MIB:
            raise DataError(
                f"from_tf: the records take more than {most_mebibytes:g} MiB of memory (after "
                f"{len(batches) + 1} batches); raise most_mebibytes, or write them to a file once: "
                f"{CONVERT} ({DOCS}#streams)"
            )
        batches.append(batch)
    if not batches:
        raise DataError("from_tf: the dataset has no records")
    digests = list(map(digest_of, batches))
    _refuse_changed(dataset, digests)
    try:
        records = map_leaves(lambda *arrays: np.concatenate(arrays), *batches)
    except ValueError as error:
        raise DataError(f"from_tf: batches do not go together: {error}") from error
    return Arrays(records, "from_tf", hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest())


def _refuse_changed(dataset: Any, digests: list[bytes]) -> None:
    """Read the dataset again, and compare its batches.

    Raises:
        DataError: a batch differs from that of the first pass.
    """
    count = 0
    for again in dataset.as_numpy_iterator():
        if count == len(digests) or digest_of(again) != digests[count]:
            break
        count += 1
    else:
        if count == len(digests):
            return
    raise DataError(
        f"from_tf: batch {count} has other records the second time that the dataset is read (shuffle, random "
        "augmentation, deterministic=False); workers could not agree on them. Leave shuffle out: the job "
        f"shuffles by itself. Put augmentation into transform() ({DOCS}#augmentation)"
    )


def _refuse_random(dataset: Any) -> None:
    """Refuse random operations, and an order that differs from run to run.

    Raises:
        DataError: the pipeline has one of them.
    """
    for stage in _stages(dataset):
        if getattr(stage, "_deterministic", None) == "false" or stage.options().deterministic is False:
            raise DataError(UNORDERED)
        for function in stage._functions():
            graph = function.function.graph.as_graph_def()
            nodes = [*graph.node, *(node for nested in graph.library.function for node in nested.node_def)]
            for node in nodes:
                if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
                    raise DataError(UNORDERED)
                if node.op in RANDOM:
                    raise DataError(
                        f"from_tf: a function of the pipeline draws random numbers ({node.op}), which would "
                        f"be the same in each epoch; put them into transform() ({DOCS}#augmentation), or use "
                        "tf.random.stateless_* for constants"
                    )


def _stages(dataset: Any) -> Iterator[Any]:
    """The dataset, and those that it is made of."""
    yield dataset
    for source in dataset._inputs():
        yield from _stages(source)
