"""Rows and their ids on the wire, for whoever asks several servers: which server is asked for which, and
where what it answers belongs.

Promise: rows come out in the order in which their ids went in, whatever servers they come from; an answer
that does not fit is refused, with the server's number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edl.contract.rows.buckets import bucket_of
from edl.contract.rows.placement import Arrangement
from edl.errors import EdlError

PAGE_BYTES = 16 << 20  # of one answer, when all rows are asked for
IDS, VALUES = np.dtype("<i8"), np.dtype("<f4")
OPTIONS = [  # of a channel to a server
    ("grpc.max_receive_message_length", -1),  # as many rows as a batch has
    ("grpc.max_send_message_length", -1),
    # One whose node is lost says nothing more: ask, so that the call fails after 15 s. (A call to a process
    # that is stopped fails after 70 s, for gRPC waits a minute for the answer to a ping.)
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]


class Shares:
    """Which of some ids belong to which server."""

    def __init__(self, ids: np.ndarray, servers: int | Arrangement, second: bool = False):
        """
        Args:
            servers: how many there are, or which.
            second: who has an id beside the server that is asked first.
        """
        of = servers if isinstance(servers, Arrangement) else Arrangement(servers)
        self.ids = ids
        self._all = slice(None) if of.servers == 1 and not second else None
        if self._all is None:
            whose = (of.second if second else of.first)[bucket_of(ids)]
            self._order = np.argsort(whose, kind="stable")
            self._ends = np.searchsorted(whose[self._order], np.arange(of.servers + 1))

    def of(self, server: int) -> Any:
        """An index of those of a server."""
        if self._all is not None:
            return self._all
        return self._order[self._ends[server] : self._ends[server + 1]]

    def has(self, server: int) -> bool:
        return bool(len(self.ids) if self._all is not None else self._ends[server + 1] > self._ends[server])


def encoded(values: np.ndarray, dtype: np.dtype[Any]) -> bytes:
    return np.ascontiguousarray(values, dtype).tobytes()


def put(found: np.ndarray, places: Any, rows: bytes, index: int) -> None:
    values = np.frombuffer(rows, VALUES)
    expected = found[places].shape if isinstance(places, slice) else (len(places), found.shape[1])
    if values.size != expected[0] * expected[1]:
        raise EdlError(f"parameter server {index} has sent {values.size} values, expected {expected}")
    found[places] = values.reshape(expected)
