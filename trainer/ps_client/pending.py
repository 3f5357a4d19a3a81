# SPDX-License-Identifier: Apache-2.0
"""Concurrent calls of several parameter servers with one combined result.

The worker can compute while the calls run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from edl.trainer.ps_client.calls import Pending, ServerAway, Writing
from edl.trainer.ring.base import RingBroken

T = TypeVar("T")


class Begun(Generic[T]):
    """Running calls of several servers.

    Args:
        calls: by the server's index.
        made: combines all answers into the result.
        wait_forever: wait for every server, even if others hold its rows.
    """

    def __init__(
        self, calls: Mapping[int, Pending], made: Callable[[dict[int, Any]], T], wait_forever: bool = False
    ):
        self._calls, self._made, self._wait_forever = calls, made, wait_forever

    def result(self) -> T:
        """Wait for all answers and combine them.

        A wait without a limit ends as soon as another server rejects its call.

        Raises:
            RingBroken: the ring was cut; or a server is away whose rows others hold.
        """
        try:
            answers, later = {}, [*self._calls.values()]
            for index, call in self._calls.items():
                later.remove(call)
                look = partial(_check, [*later]) if self._wait_forever else _nothing
                answers[index] = call.result(self._wait_forever, look)
            return self._made(answers)
        except ServerAway as error:
            raise RingBroken(str(error)) from error
        finally:
            self.forget()

    def forget(self) -> None:
        forget(self._calls.values())


def forget(calls: Iterable[Pending | Writing]) -> None:
    """Drop the answers of these calls."""
    for call in calls:
        call.forget()


def _check(calls: Iterable[Pending]) -> None:
    for call in calls:
        call.check()


def _nothing() -> None: ...
