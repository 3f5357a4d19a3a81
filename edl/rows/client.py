# SPDX-License-Identifier: Apache-2.0
"""A client that reads rows of parameter servers during training, to serve a model or to copy the rows.

    from edl.rows.client import Client

    with Client(["edl-ps-0.edl-ps:8600", "edl-ps-1.edl-ps:8600"], token) as client:
        vectors = client.rows("user", ids)       # float32 [n, dim]
        news = client.changed("user", mark)      # later changes; news.mark for the next call

It needs NumPy and gRPC, but not TensorFlow. `edl token --read` prints the token, which allows reading only.

Promise: each row read was its server's state at some step. A reader changes nothing, and workers wait for at
most one of its calls, of at most one page. The client waits for a server that is down, until its timeout. If
each row is on two servers, it waits for at most two seconds before it reads from the other server. Servers
may differ by one step, and the last step may be undone when a worker dies. Rows are never older than an
earlier `step`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from edl.contract.fingerprint import fingerprint
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.shares import IDS, PAGE_BYTES, VALUES, Shares, encoded, put
from edl.errors import EdlError
from edl.rows.servers import Known, NotYet, Servers, Table

TIMEOUT_SECONDS = 10.0
TEXTS = (1 << 63) - 1  # range of text hashes for a layer without input_dim
ATTEMPTS = 3  # to list a table while servers roll back


@dataclass(frozen=True)
class Changed:
    """Rows of a table that have changed.

    Args:
        ids: int64 [n], each once.
        rows: float32 [n, dim].
        step: the rows are of this state or a later one.
        mark: argument of the next `changed`, for later changes.
        whole: these are all rows; any other rows that the reader has are obsolete.
    """

    ids: np.ndarray
    rows: np.ndarray
    step: int
    mark: str
    whole: bool


@dataclass(frozen=True)
class Pages:
    """Rows of a table that have changed, to be iterated once.

    Args:
        dim: the length of a row.
        step, mark, whole: as in `Changed`.
        each: yields the pages: ids int64 [n], no id twice, and rows float32 [n, dim].
    """

    dim: int
    step: int
    mark: str
    whole: bool
    each: Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return self.each()


class RolledBack(EdlError):
    """A server rolled back to a checkpoint, or was resharded, while its rows were listed."""


def text_ids(
    texts: Iterable[str | bytes], input_dim: int | None = None, mask_zero: bool = False
) -> np.ndarray:
    """Convert texts to ids like `edl.layers.Embedding`, int64 [n].

    Args:
        input_dim, mask_zero: arguments of that layer.
    """
    count = input_dim or TEXTS
    found = []
    for text in texts:
        raw = text.encode() if isinstance(text, str) else bytes(text)
        if mask_zero:
            found.append(1 + fingerprint(raw) % (count - 1) if raw else 0)
        else:
            found.append(fingerprint(raw) % count)
    return np.array(found, np.int64)


class Client:
    """A client of all servers of one job. It is thread-safe, but must be created after a fork, not before.

    Args:
        addresses: host:port of all servers, in the order of their numbers.
        token: the job's read token, or the job's own token.
        timeout: seconds that a call (each page, in `changed`) waits for servers that are down.
        ca: file of the authority of the servers' certificates (ca.crt), if they use TLS; None: EDL_TLS_CA.

    Raises (every method):
        EdlError: a server does not answer in time, or rejects the call; the message names it.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        token: str,
        timeout: float = TIMEOUT_SECONDS,
        ca: str | os.PathLike[str] | None = None,
    ):
        self._servers = Servers(addresses, token, timeout, ca)

    def rows(self, table: str, ids: Any) -> np.ndarray:
        """Read the current rows of these ids, float32 [n, dim], in the order of `ids`.

        An id that was not learned yet has its initial row.

        Args:
            ids: integers [n]; for texts, see `text_ids`.
        """
        unique, places = np.unique(_checked(ids), return_inverse=True)
        dim = self._servers.table(table).dim
        most = max(PAGE_BYTES // (4 * dim), 1)  # a larger call would delay the workers
        pieces = [unique[start : start + most] for start in range(0, max(len(unique), 1), most)]
        found = [self._servers.in_time(partial(self._pull, table, piece)) for piece in pieces]
        rows: np.ndarray = np.concatenate(found)[places.reshape(-1)]
        return rows

    def changed(self, table: str, since: str = "") -> Changed:
        """Read the rows of a table that have changed since an earlier call of `changed`; by default, all.

        They are read page by page while the job trains. A row that changes meanwhile may be of an earlier or
        a later step, and is returned again by the next call. So are the rows of the last step. Rows that were
        forgotten (`ttl_steps`) are not reported.

        Args:
            since: the `mark` of the earlier call.

        Raises:
            EdlError: `since` is not a mark.
        """
        for _ in range(ATTEMPTS):
            pages = self.pages(table, since)
            ids, rows = [np.empty(0, np.int64)], [np.empty((0, pages.dim), np.float32)]
            try:
                for some, theirs in pages:
                    ids.append(some)
                    rows.append(theirs)
            except RolledBack:
                continue
            return Changed(np.concatenate(ids), np.concatenate(rows), pages.step, pages.mark, pages.whole)
        raise EdlError(
            f"table {table!r}: the servers rolled back {ATTEMPTS} times while it was read: try again"
        )

    def pages(self, table: str, since: str = "") -> Pages:
        """Like `changed`, but page by page, for large tables. Nothing is read before the first page is taken.

        Raises:
            RolledBack: (raised by the pages) the servers have rolled back to a checkpoint: start again.
            EdlError: `since` is not a mark; or the servers do not answer within the timeout.
        """
        step, _, incarnation = since.partition("-")
        if since and not (incarnation and step.isdecimal()):
            raise EdlError(f"since: {since!r}: expected the mark of another `changed`, or none")
        known = self._servers.in_time(self._servers.find)
        number, about = self._servers.numbered(table, known)
        whole = incarnation != known.incarnation
        # The last step can be undone, so its changes are requested again.
        first = 0 if whole else max(int(step) - 1, 0)
        request = pb.ListRequest(
            run_id=known.run_id,
            table=number,
            since=first,
            most=max(PAGE_BYTES // (8 + 4 * about.dim), 1),
            **known.expected,
        )
        now = min(known.steps)
        pages = partial(self._list, request, known, about.dim)
        return Pages(about.dim, now, f"{now}-{known.incarnation}", whole, pages)

    def tables(self) -> tuple[Table, ...]:
        """The existing tables, with their current numbers of rows."""
        return self._servers.in_time(self._servers.find).tables

    @property
    def step(self) -> int:
        """The step that all servers have reached."""
        return min(self._servers.in_time(self._servers.find).steps)

    def close(self) -> None:
        """Close the connections; the client cannot be used any more."""
        self._servers.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pull(self, table: str, ids: np.ndarray, deadline: float) -> np.ndarray:
        """Pull the rows of these ids from their servers.

        Args:
            ids: int64 [n], each once.
        """
        known = self._servers.known
        if known is None or known.is_old:
            known = self._servers.find(deadline)
        number, about = self._servers.numbered(table, known)
        shares = Shares(ids, known.of)
        requests = {
            index: pb.PullRequest(
                run_id=known.run_id,
                ids=[pb.Ids(table=number, ids=encoded(ids[shares.of(index)], IDS))],
                **known.expected,
            )
            for index in known.of.members
            if shares.has(index)
        }
        rows = np.empty((len(ids), about.dim), np.float32)
        for index, answer in self._servers.ask("Pull", requests, known.until(deadline)).items():
            put(rows, shares.of(index), b"".join(answer.rows), index)
        return rows

    def _list(
        self, request: pb.ListRequest, known: Known, dim: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the pages of a list request to all servers.

        Raises:
            RolledBack: a server has rolled back to a checkpoint.
        """
        asked = {index: _copied(request) for index in known.of.members}
        while asked:
            for index, page in self._listed(known, dict(asked)).items():
                if page.incarnation != known.incarnations[index]:
                    raise RolledBack(f"{self._servers.name(index)} has rolled back to a checkpoint")
                ids = np.frombuffer(page.ids, IDS)
                if page.more:
                    asked[index].after = int(ids[-1])
                else:
                    del asked[index]
                yield ids, np.frombuffer(page.rows, VALUES).reshape(len(ids), dim)

    def _listed(self, known: Known, asked: dict[int, pb.ListRequest]) -> dict[int, Any]:
        """Request the next page from each server.

        Raises:
            RolledBack: other servers hold the rows now.
        """

        def act(deadline: float) -> dict[int, Any]:
            try:
                return self._servers.ask("List", asked, known.until(deadline))
            except NotYet as error:
                if known.of.copies > 1 and self._servers.find(deadline).of != known.of:
                    raise RolledBack(str(error)) from error
                raise

        return self._servers.in_time(act)


def _checked(ids: Any) -> np.ndarray:
    found = np.asarray(ids)
    if found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
        hint = " (text_ids makes ids of texts)" if found.dtype.kind in "USO" else ""
        raise EdlError(f"ids: {found.dtype} {list(found.shape)}: expected integers in one dimension{hint}")
    return found.astype(np.int64)


def _copied(request: pb.ListRequest) -> pb.ListRequest:
    copy = pb.ListRequest()
    copy.CopyFrom(request)
    return copy
