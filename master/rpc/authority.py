# SPDX-License-Identifier: Apache-2.0
"""The authority of a master to send messages; the server checks it before each message to a worker.

If a job can have several masters, `LeaderElection` implements this interface. A job with a single master uses
`Alone`.
"""

from __future__ import annotations

from typing import Protocol


class Authority(Protocol):
    """The authority of one master over its workers."""

    @property
    def term(self) -> int:
        """The term of this master, greater than the term of every earlier master of the job."""

    @property
    def standbys(self) -> tuple[str, ...]:
        """host:port of the standbys of this master."""

    async def confirmed(self) -> bool:
        """Wait until no other master can be acting. False if this master was superseded."""

    def outranked(self, term: int) -> None:
        """Report that a worker has obeyed a master of this term, which is greater than this master's."""


class Alone:
    """The authority of a job's only master."""

    term = 0
    standbys: tuple[str, ...] = ()

    async def confirmed(self) -> bool:
        return True

    def outranked(self, term: int) -> None: ...
