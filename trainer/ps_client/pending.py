"""Calls to several parameter servers that were begun at the same time, and the one result that is made of
their answers: so a worker can do something else meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from edl.trainer.ps_client.link import Pending, ServerAway
from edl.trainer.ring.base import RingBroken

T = TypeVar("T")


class Begun(Generic[T]):
    """Calls to several servers that were begun.

    Args:
        calls: by the server's index.
        made: the result, of all answers.
        patient: nobody can be done without.
    """

    def __init__(
        self, calls: Mapping[int, Pending], made: Callable[[dict[int, Any]], T], patient: bool = False
    ):
        self._calls, self._made, self._patient = calls, made, patient

    def result(self) -> T:
        """Raises RingBroken: it is called off; or a server is away that can be done without. Nobody is waited
        for patiently after another server has refused: then all of it is in vain."""
        try:
            answers, later = {}, [*self._calls.values()]
            for index, call in self._calls.items():
                later.remove(call)
                look = partial(_check, [*later]) if self._patient else _nothing
                answers[index] = call.result(self._patient, look)
            return self._made(answers)
        except ServerAway as error:
            raise RingBroken(str(error)) from error
        finally:
            self.forget()

    def forget(self) -> None:
        for call in self._calls.values():
            call.forget()


def _check(calls: Iterable[Pending]) -> None:
    for call in calls:
        call.check()


def _nothing() -> None: ...
