# SPDX-License-Identifier: Apache-2.0
"""What a server calls on its update mode: `edl.ps.sync.server` or `edl.ps.asynchronous.server`."""

from __future__ import annotations

from typing import Protocol

from edl.contract.proto import ps_pb2 as pb
from edl.ps.storage.capture import Capture
from edl.ps.storage.storage import Records


class UpdateMode(Protocol):
    """How a server applies steps."""

    rows_staged: int

    @property
    def began(self) -> bool:
        """Whether the server holds the state of a job. False: it is new, or has lost its log."""
        ...

    @property
    def clock(self) -> int:
        """Version of the tables: one more than the newest step stamped on a row."""
        ...

    @property
    def incarnation(self) -> str:
        """Id of this history of states. It changes when the server rolls back or starts again."""
        ...

    @property
    def pending(self) -> int:
        """Bytes of gradients that are not in the rows yet, and of fetched rows."""
        ...

    @property
    def is_resharding(self) -> bool:
        """True while rows for another shard assignment are fetched; the state cannot be captured then."""
        ...

    def position(self) -> pb.Position:
        """Return the server's step, generation and assignment, as a new ring's root needs them."""
        ...

    def start_generation(self, request: pb.StartGenerationRequest) -> pb.Position:
        """Start a generation, so that calls of earlier ones are rejected."""
        ...

    def restore(self, request: pb.RestoreRequest) -> pb.Position:
        """Roll back to the checkpoint of a step; 0: to the initial state. A repeated call changes nothing."""
        ...

    # Resharding.
    def fetch(self, request: pb.FetchRequest) -> list[int]:
        """Begin to fetch rows for a different assignment. Return the servers that send them."""
        ...

    def take_page(self, request: pb.FetchRequest, raw: bytes) -> pb.PageOfRows:
        """Log and keep a page of rows that `fetch` has requested."""
        ...

    def fetched(self, request: pb.FetchRequest) -> pb.Position:
        """All pages of the fetch have arrived: the server can switch to the new assignment."""
        ...

    def page(self, request: pb.PageRequest) -> pb.PageOfRows:
        """Return one page of rows for a different server."""
        ...

    def assign(self, request: pb.AssignRequest) -> pb.Position:
        """Switch to a shard assignment whose rows are here, or keep the present one."""
        ...

    def advance_to(self, request: pb.PullRequest | pb.ListRequest | pb.WritePartRequest) -> None:
        """Apply the pending step if `request` is the first to need the state after it.

        Raises:
            Refused: the server cannot reach the requested state.
        """
        ...

    def capture(self) -> Capture:
        """Capture the present state, to be copied later."""
        ...

    @property
    def shards_suffice(self) -> bool:
        """Whether the shards of a checkpoint have all that this server needs to resume from it."""
        ...

    def rebased(self) -> None:
        """The log now starts at a newer base."""
        ...

    def beginning(self) -> Records:
        """The first records of a log segment that starts at the present state."""
        ...

    def load_base(self) -> None:
        """Load the rows of the log's base."""
        ...

    def replay(self, kind: bytes, text: bytes) -> None:
        """Apply a log record again. Raises: Damaged."""
        ...
