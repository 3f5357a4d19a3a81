# SPDX-License-Identifier: Apache-2.0
"""Rows and ids on the wire, for a caller of several servers: splits ids by server and merges the answers.

Promise: rows are in the order of their ids, whichever servers sent them. An answer that does not fit is
rejected with the server's number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edl.contract.rows.buckets import bucket_of
from edl.contract.rows.placement import ShardAssignment
from edl.errors import EdlError

PAGE_BYTES = 16 << 20  # size of one answer when all rows are read
IDS, VALUES = np.dtype("<i8"), np.dtype("<f4")
OPTIONS = [  # options of a channel to a server
    ("grpc.max_receive_message_length", -1),  # a batch may have any number of rows
    ("grpc.max_send_message_length", -1),
    # Pings let calls to a lost node fail after 15 s. Calls to a stopped process fail after 70 s, because gRPC
    # waits a minute for the answer to a ping.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]


class Shares:
    """A partition of ids by server.

    Args:
        ids: int64 [n].
        servers: their number, or a shard assignment.
        second: partition by the server of the second replica.
    """

    def __init__(self, ids: np.ndarray, servers: int | ShardAssignment, second: bool = False):
        of = servers if isinstance(servers, ShardAssignment) else ShardAssignment(servers)
        self.ids = ids
        self._all = slice(None) if of.servers == 1 and not second else None
        if self._all is None:
            whose = (of.second if second else of.first)[bucket_of(ids)]
            self._order = np.argsort(whose, kind="stable")
            self._ends = np.searchsorted(whose[self._order], np.arange(of.servers + 1))

    def of(self, server: int) -> Any:
        """An index of the ids of a server."""
        if self._all is not None:
            return self._all
        return self._order[self._ends[server] : self._ends[server + 1]]

    def has(self, server: int) -> bool:
        """True if a server has at least one of the ids."""
        return bool(len(self.ids) if self._all is not None else self._ends[server + 1] > self._ends[server])


def encoded(values: np.ndarray, dtype: np.dtype[Any]) -> bytes:
    """Return the values as bytes of `dtype`, which states the byte order."""
    return np.ascontiguousarray(values, dtype).tobytes()


def put(found: np.ndarray, places: Any, rows: bytes, index: int) -> None:
    """Write a server's rows into their places in `found`, float32 [n, dim].

    Args:
        places: the rows' places, as `Shares.of` returns them.
        rows: the answer of server `index`: float32, little-endian.

    Raises:
        EdlError: the answer has a different number of values.
    """
    values = np.frombuffer(rows, VALUES)
    expected = found[places].shape if isinstance(places, slice) else (len(places), found.shape[1])
    if values.size != expected[0] * expected[1]:
        raise EdlError(f"parameter server {index} sent {values.size} values: expected {expected}")
    found[places] = values.reshape(expected)
