# SPDX-License-Identifier: Apache-2.0
"""State machines as tables: the state and an event give the next state.

A table is the only place that changes a state. `scripts/dev/docs` draws each one into docs/state-tables.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from edl.errors import EdlError

S = TypeVar("S", bound=StrEnum)


class ImpossibleStep(EdlError):
    """A transition that the state table does not have."""


@dataclass(frozen=True, slots=True)
class Table(Generic[S]):
    """A state machine.

    Args:
        of: what has the state, with its article, for errors.
        first: the first state.
        steps: the next state by state and event.
    """

    of: str
    first: S
    steps: Mapping[tuple[S, str], S]

    def after(self, state: S, event: str) -> S:
        """Return the state after `event`.

        Raises:
            ImpossibleStep: the table has no transition for it.
        """
        try:
            return self.steps[state, event]
        except KeyError:
            raise ImpossibleStep(f"{self.of} that is {state} has no transition for {event!r}") from None
