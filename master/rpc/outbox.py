"""What is still to be sent to one worker.

What goes to many is serialised once, and they share the bytes. A worker that reads slowly costs no memory
that grows: what a later message makes void is dropped. Changes of the task are not, while their ring runs:
every member takes all of them, one by one and at the same steps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edl.contract.proto import edl_pb2 as pb


@dataclass(frozen=True, slots=True)
class Letter:
    """A message as it goes over the wire, and what is to be known of it here."""

    body: str
    generation: int
    wire: bytes

    @staticmethod
    def of(message: pb.ToWorker, run_id: str, term: int = 0) -> Letter:
        message.run_id, message.term = run_id, term
        return Letter(message.WhichOneof("body") or "", message.generation, message.SerializeToString())


# What a new letter makes void: whether an older one is.
VOID: Mapping[str, Callable[[Letter, Letter], bool]] = {
    "welcome": lambda new, old: old.body == "welcome",
    "form": lambda new, old: 0 < old.generation < new.generation,
    "cut": lambda new, old: old.generation == new.generation and old.body != "form",
}


class Outbox:
    """Of one stream: letters go in at once, and out as fast as the worker reads."""

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
        """Nothing comes after what is in it."""
        self._closed = True
        self._news.set()

    async def next(self) -> bytes | None:
        """The next message; None: it was the last."""
        while not self._waiting:
            if self._closed:
                return None
            self._news.clear()
            await self._news.wait()
        return self._waiting.popleft().wire
