"""Whether this master may speak: what the server asks before each word to a worker.

Where one master can follow another, the adapter that knows who acts answers (`LeaderElection`). A master
whose workers nobody else can have has `Alone`.
"""

from __future__ import annotations

from typing import Protocol


class Authority(Protocol):
    """Of one master, over its workers."""

    @property
    def term(self) -> int:
        """Greater than that of every earlier master of the job."""

    @property
    def standbys(self) -> tuple[str, ...]:
        """host:port of the masters that stand by for this one."""

    async def confirmed(self) -> bool:
        """Wait until no other master can be acting. False: another one does, for good."""

    def outranked(self, term: int) -> None:
        """A worker has obeyed a master of this term, which is greater."""


class Alone:
    """There is no other master."""

    term = 0
    standbys: tuple[str, ...] = ()

    async def confirmed(self) -> bool:
        return True

    def outranked(self, term: int) -> None: ...
