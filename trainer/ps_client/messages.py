# SPDX-License-Identifier: Apache-2.0
"""Conversion between the worker's types and the messages of ps.proto.

Splits the ids of a table by server, and merges the rows of the servers' answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from edl.checkpoints import CheckpointFile
from edl.contract.converted import written
from edl.contract.proto import ps_pb2 as pb
from edl.contract.ranges import Range, RangeSet
from edl.contract.rows.placement import ShardAssignment
from edl.contract.rows.shares import IDS, PAGE_BYTES, VALUES, Shares, encoded, put
from edl.errors import EdlError
from edl.trainer.embedding.interfaces import Table
from edl.trainer.ps_client.interfaces import Values


def tables_to_proto(
    tables: Sequence[Table], run_id: str, seed: int, asynchronous: pb.Asynchronous | None
) -> pb.Tables:
    """The tables of a job.

    Args:
        seed: the seed of the job; initial rows depend on it.
        asynchronous: options of mode=ps; None for synchronous steps (mode=hybrid).
    """
    return pb.Tables(
        run_id=run_id,
        seed=seed,
        tables=[written(pb.Table, table) for table in tables],
        asynchronous=asynchronous,
    )


def ids_asked(index: int, shares: Sequence[Shares]) -> list[pb.Ids]:
    """The ids to pull from one server.

    Args:
        index: the index of the server.
        shares: of each table, by number.
    """
    return [
        pb.Ids(table=table, ids=encoded(share.ids[share.of(index)], IDS))
        for table, share in enumerate(shares)
        if share.has(index)
    ]


def put_together(
    ids: Sequence[np.ndarray],
    tables: Sequence[Table],
    shares: Sequence[Shares],
    requests: Mapping[int, pb.PullRequest],
    answers: Mapping[int, pb.Rows],
) -> list[np.ndarray]:
    """The rows of each table, float32 [n, dim], in the order of its ids.

    Args:
        ids: the ids of each table, int64 [n].
        shares: the same, by server.
        requests, answers: the request and answer of each server, by its index.

    Raises:
        EdlError: an answer does not fit its request.
    """
    found = [np.empty((len(each), t.dim), np.float32) for each, t in zip(ids, tables, strict=False)]
    for index, answer in answers.items():
        asked = requests[index].ids
        if len(answer.rows) != len(asked):
            raise EdlError(
                f"parameter server {index} has sent rows of {len(answer.rows)} tables, asked for {len(asked)}"
            )
        for one, rows in zip(asked, answer.rows, strict=True):
            put(found[one.table], shares[one.table].of(index), rows, index)
    return found


def shares_of(ids: np.ndarray, of: ShardAssignment, copies: int) -> tuple[Shares, ...]:
    """The servers of these ids, and those of their second replicas if there are any and `copies` is 2."""
    return tuple(Shares(ids, of, second) for second in (False, True)[: min(copies, of.copies)])


def add_values(to: Any, index: int, values: Values, shares: Sequence[Sequence[Shares]]) -> bool:
    """Add the gradients or rows for one server to a message, including those of replicas.

    Args:
        to: the field of the message, repeated `Gradients`.
        index: the index of the server.
        shares: of each table, by replica.

    Returns:
        whether there were any.
    """
    for table, ((ids, rows), copies) in enumerate(zip(values, shares, strict=True)):
        if mine := [share.of(index) for share in copies if share.has(index)]:
            here = mine[0] if len(mine) == 1 else np.concatenate(mine)
            # `add` avoids a copy that a list would cost.
            to.add(table=table, ids=encoded(ids[here], IDS), values=encoded(rows[here], VALUES))
    return bool(to)


def rows_per_page(dim: int) -> int:
    """The number of rows in one message when many rows are read or written."""
    return max(PAGE_BYTES // (8 + 4 * dim), 1)


def furthest_of(told: Iterable[pb.Description]) -> int:
    """One more than the last step that one of these servers has accepted."""
    return max((one.accepted.bounds[-1] for one in told if one.accepted.bounds), default=0)


def ranges_of(steps: pb.Steps) -> RangeSet:
    """Parse steps, which a message has as the bounds of their ranges."""
    pairs: list[Range] = list(pairwise(steps.bounds))[::2]
    return RangeSet.of(pairs)


def part_of(written: pb.Written) -> CheckpointFile:
    """A server's part of a checkpoint."""
    return CheckpointFile(written.name, written.nbytes, written.sha256.hex())
