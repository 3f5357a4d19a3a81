# SPDX-License-Identifier: Apache-2.0
"""A master's storage, served from a directory; this process gets the environment of a worker's pod."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import pytest

from edl.contract.proto import storage_pb2_grpc as rpc
from edl.contract.tokens import Tokens
from edl.master.rpc.storage import Storage
from edl.net.listener import Listener

RUN, TOKEN = "run1", "a token"


@contextmanager
def serving(root: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve the files in `root`, as the master of `RUN` does."""
    loop, storage = asyncio.new_event_loop(), Storage(root, RUN)
    listener = Listener(Tokens(TOKEN))

    def serve(server: grpc.aio.Server) -> None:
        rpc.add_StorageServicer_to_server(storage, server)

    port = loop.run_until_complete(listener.start("127.0.0.1:0", serve))
    (thread := threading.Thread(target=loop.run_forever)).start()
    try:
        patch.setenv("EDL_MASTER", f"127.0.0.1:{port}")
        patch.setenv("EDL_TOKEN", TOKEN)
        yield
    finally:
        asyncio.run_coroutine_threadsafe(listener.close(0), loop).result(10)
        storage._threads.shutdown()  # a broken stream is removed on a thread, which asks the loop
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
