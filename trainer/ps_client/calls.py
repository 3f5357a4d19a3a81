# SPDX-License-Identifier: Apache-2.0
"""Calls of one parameter server: what a link starts, and the errors with which a call ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from edl.contract.proto import ps_pb2 as pb
from edl.errors import EdlError
from edl.trainer.ps_client.interfaces import PartNotWritten

Request: TypeAlias = Any  # a message of ps.proto


class ServerRefused(EdlError):
    """A parameter server rejects a request, and would reject it again."""


class ServerAway(Exception):
    """A server does not answer, and other servers hold its rows, or it is not known to hold any."""


class TokenRefused(Exception):
    """A parameter server rejects this worker's token, which was replaced.

    A worker with the new token continues.
    """


class Pending(Protocol):
    """A call that was started."""

    def result(
        self, wait_forever: bool = False, look: Callable[[], None] = lambda: None, within: float = math.inf
    ) -> Any:
        """Wait for the answer.

        Args:
            wait_forever: wait even if other servers hold the server's rows.
            within: limit in seconds for a server that is away.
            look: called at intervals meanwhile; may raise.

        Raises:
            RingBroken: the ring was cut, or the server has lost its state.
            ServerRefused: the server rejects the request.
            ServerAway: the server does not answer, and other servers hold its rows or `within` has passed.
        """
        ...

    def check(self) -> None:
        """Call the server again if it was away, without waiting for the answer.

        Raises:
            RingBroken: the server has lost its state.
            ServerRefused: the server has refused the call.
        """
        ...

    def forget(self) -> None:
        """Drop the answer: no caller needs it."""
        ...


class Writing(Protocol):
    """A shard of a checkpoint that a server is writing."""

    def captured(self) -> None:
        """Wait until the server has captured the state.

        Raises:
            CheckpointError: the server cannot capture it.
            PartNotWritten: the server became unreachable.
        """
        ...

    def written(self) -> pb.Written:
        """Wait until the shard is written.

        Raises:
            CheckpointError: the server cannot write it.
            PartNotWritten: the server became unreachable.
        """
        ...

    def forget(self) -> None:
        """Cancel the call, because the shard is not needed."""
        ...


class Link(Protocol):
    """The interface of `ServerLink`, which the simulator implements, too."""

    def begin(self, method: str, request: Request, generation: int | None = None) -> Pending:
        """Start a call. Returns at once.

        Args:
            method: the name of a method of `ParameterServer`.
            generation: the server's known generation throughout the call; None if unknown.
        """
        ...

    def write_part(self, request: pb.WritePartRequest) -> Writing:
        """Make the server write its shard of a checkpoint. Never repeated: a later capture would differ."""
        ...

    def tell(self, method: str, request: Request) -> None:
        """Start a call and ignore the answer."""
        ...


class ReleasedServer:
    """The link to a server that the master has released, and that will never answer.

    A root that the master had already removed may have claimed other servers since, and have named this one
    as a member. It has no rows, and waiting for it would never end.

    Args:
        link: the link to its process.
    """

    def __init__(self, index: int, link: Link):
        self._index, self.link = index, link

    def begin(self, method: str, request: Request, generation: int | None = None) -> Pending:
        """Start a call, whose answer is that the server is empty."""
        return _Released(self._index, method)

    def write_part(self, request: pb.WritePartRequest) -> Writing:
        """Refuse to write a shard.

        Raises:
            PartNotWritten: always; the server is no member of any assignment.
        """
        raise PartNotWritten(f"parameter server {self._index} is released")

    def tell(self, method: str, request: Request) -> None:
        """Ignore the message."""


class _Released:
    """A call of a released server."""

    def __init__(self, index: int, method: str):
        self._index, self._method = index, method

    def result(
        self, wait_forever: bool = False, look: Callable[[], None] = lambda: None, within: float = math.inf
    ) -> pb.Position:
        if self._method != "Declare":
            raise ServerAway(f"parameter server {self._index} is released")
        return pb.Position(empty=True)

    def check(self) -> None: ...

    def forget(self) -> None: ...
