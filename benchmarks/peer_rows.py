# SPDX-License-Identifier: Apache-2.0
"""A parameter server in the way of ElasticDL's Python one: a dict of rows, and a loop over the ids in Python.

`python -m benchmarks.peer_rows DIM` prints its port and serves until its standard input ends. The bytes on
the wire are as ours, so that only the tables differ.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import numpy as np

from edl.ps.rpc.service import OPTIONS


class Rows:
    """ElasticDL's EmbeddingTable and the SGD of its optimizer wrapper."""

    def __init__(self, dim: int):
        self._dim = dim
        self._rows: dict[int, np.ndarray] = {}
        self._rng = np.random.default_rng(0)

    async def pull(self, request: bytes, _: Any) -> bytes:
        return self._gather(np.frombuffer(request, np.int64)).tobytes()

    async def push(self, request: bytes, _: Any) -> bytes:
        """The number of ids in 8 bytes, the ids, the gradients."""
        n = int.from_bytes(request[:8], "little")
        ids = np.frombuffer(request, np.int64, n, 8)
        gradients = np.frombuffer(request, np.float32, -1, 8 + 8 * n).reshape(n, self._dim)
        values = self._gather(ids) - np.float32(0.1) * gradients
        for id, value in zip(ids.tolist(), values, strict=True):
            self._rows[id] = value
        return b""

    def _gather(self, ids: np.ndarray) -> np.ndarray:
        found = []
        for id in ids.tolist():
            row = self._rows.get(id)
            if row is None:
                row = self._rng.uniform(-0.05, 0.05, self._dim).astype(np.float32)
                self._rows[id] = row
            found.append(row)
        return np.stack(found)


async def serve(dim: int) -> None:
    rows = Rows(dim)
    server = grpc.aio.server(options=OPTIONS)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Pull": grpc.unary_unary_rpc_method_handler(rows.pull),
        "Push": grpc.unary_unary_rpc_method_handler(rows.push),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("peer", handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
