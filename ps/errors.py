"""Why a server does not do what it is told. Each becomes one status of gRPC (`service`)."""

from __future__ import annotations

from edl.errors import EdlError


class Refused(EdlError):
    """The root of these."""


class Invalid(Refused):
    """The request cannot be right, whatever the state of the server."""


class Stale(Refused):
    """It speaks of a generation that has passed."""


class Unsettled(Refused):
    """It speaks of a generation that is not settled yet: it waits, and is not answered with this."""


class Misplaced(Refused):
    """It speaks of another state than the one that the server has."""


class OutOfMemory(Refused):
    """The server would have to keep more than it may."""


class Unavailable(Refused):
    """It cannot be done now: the disk is full."""


class Unreadable(Unavailable):
    """A checkpoint cannot be read: now, if its store is away, or never, if it is damaged or not there."""
