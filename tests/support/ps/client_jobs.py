# SPDX-License-Identifier: Apache-2.0
"""Parameter servers that listen, and are killed, and a worker's client of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from edl.checkpoints import Store
from edl.trainer.embedding.interfaces import Commit, Table
from edl.trainer.ps_client.client import PsClient
from tests.support.fakes.parameter_server import FakeServer, Listening

WORDS, PLACES = Table("words", 2, "{}", "{}"), Table("places", 3, "{}", "{}", min_count=4, ttl_steps=5)
SECONDS = 30.0


class Job:
    """Servers that listen, and one worker's view of them."""

    def __init__(self, servers: int, store: Store | None = None):
        self.store = store
        self.there = [Listening(FakeServer(index, servers, store)) for index in range(servers)]
        self.last: Commit | None = None
        self.threads = ThreadPoolExecutor(4)
        self.client = self.another()

    def another(self, token: str = "token") -> PsClient:
        client = PsClient.at([s.address for s in self.there], token, "a-run", 7)
        client.declare((WORDS, PLACES), lambda: self.last)
        client.enter()
        return client

    def begin(self) -> None:
        """A ring at step 0."""
        self.client.claim(1)
        self.client.restore(0, "")

    def takes_a_step(self, step: int, ids: list[int], skipped: bool = False) -> None:
        """Add one to the rows of these words."""
        some = np.array(ids, np.int64)
        self.client.pull(step, [some])
        self.client.stage(step, 0, [(some, -np.ones((len(ids), 2), np.float32))])
        self.last = Commit(step, skipped, 0.5, 0.1, step, self.client.generation)

    def kill(self, index: int) -> None:
        self.there[index].kill()

    def comes_back(self, index: int, lost: bool = False) -> None:
        before = self.there[index]
        server = FakeServer(index, len(self.there), self.store) if lost else before.server
        self.there[index] = Listening(server, before.port)

    def beside(self, act: Callable[[], Any]) -> Future[Any]:
        return self.threads.submit(act)

    def end(self) -> None:
        self.client.cut()
        for server in self.there:
            server.kill()
        self.threads.shutdown()
