# SPDX-License-Identifier: Apache-2.0
"""The reasons for which a server rejects a call. Each maps to one gRPC status (`edl.ps.rpc.service`)."""

from __future__ import annotations

from edl.errors import EdlError


class Refused(EdlError):
    """Base class of these errors."""


class Invalid(Refused):
    """The request is invalid in every state of the server."""


class Stale(Refused):
    """The request's generation is older than the server's."""


def check_not_stale(generation: int, newest: int) -> None:
    """Check that no newer generation than the caller's has started.

    Raises:
        Stale: `newest` has started since.
    """
    if generation < newest:
        raise Stale(f"stale generation {generation}: generation {newest} has started")


class GenerationPending(Refused):
    """The request's generation has not started yet. The call waits; no caller receives this error."""


class Misplaced(Refused):
    """The request is for a state that differs from the server's."""


class OutOfMemory(Refused):
    """The request would exceed the server's memory limit."""


class Unavailable(Refused):
    """The request cannot be served now, for example because the disk is full."""


class Unreadable(Unavailable):
    """A checkpoint cannot be read: its store is unavailable, or it is damaged or missing."""
