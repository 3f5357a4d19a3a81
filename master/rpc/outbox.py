# SPDX-License-Identifier: Apache-2.0
"""The messages to one worker that wait to be sent.

A message to many workers is serialised once, and they share the bytes. Messages that a later one makes
obsolete are dropped, so that a worker that reads slowly costs no growing memory. Changes of the task are not
dropped while their ring runs: every member must take all of them, one by one and at the same steps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edl.contract.proto import edl_pb2 as pb


@dataclass(frozen=True, slots=True)
class Letter:
    """A serialised message, and the properties that the outbox needs."""

    body: str
    generation: int
    wire: bytes

    @staticmethod
    def of(message: pb.ToWorker, run_id: str, term: int = 0) -> Letter:
        message.run_id, message.term = run_id, term
        return Letter(message.WhichOneof("body") or "", message.generation, message.SerializeToString())


# Whether a new letter, by its kind, makes an older one obsolete.
VOID: Mapping[str, Callable[[Letter, Letter], bool]] = {
    "welcome": lambda new, old: old.body == "welcome",
    "form": lambda new, old: 0 < old.generation < new.generation,
    "cut": lambda new, old: old.generation == new.generation and old.body != "form",
}


class Outbox:
    """The queue of one stream; `put` never waits, and `next` is called as fast as the worker reads."""

    def __init__(self) -> None:
        self._waiting: deque[Letter] = deque()
        self._closed = False
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, letter: Letter) -> None:
        if self._waiting and (void := VOID.get(letter.body)) is not None:
            self._waiting = deque(old for old in self._waiting if not void(letter, old))
        self._waiting.append(letter)
        self._news.set()

    def close(self) -> None:
        """Close the queue: no message follows those that wait."""
        self._closed = True
        self._news.set()

    async def next(self) -> bytes | None:
        """Wait for the next message; None after the last one."""
        while not self._waiting:
            if self._closed:
                return None
            self._news.clear()
            await self._news.wait()
        return self._waiting.popleft().wire
