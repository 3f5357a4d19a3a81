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

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import grpc
import numpy as np

from edl.contract.fingerprint import fingerprint
from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc as rpc
from edl.contract.rows.placement import ShardAssignment
from edl.contract.rows.shares import IDS, OPTIONS, PAGE_BYTES, VALUES, Shares, encoded, put
from edl.errors import EdlError
from edl.net import tls

T = TypeVar("T")
TIMEOUT_SECONDS = 10.0
PAUSE_SECONDS = 0.05  # between two attempts
TEXTS = (1 << 63) - 1  # range of text hashes for a layer without input_dim
PATIENCE_SECONDS = 1.0  # wait for a server that is down, if a second server holds its rows
LOOK_SECONDS = 1.0  # then the assignment of rows with replicas is refreshed: a server that is out is unaware
ATTEMPTS = 3  # to list a table while servers roll back
# Statuses of a call when the server is down, or has no rows at present.
AWAY = {
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL, grpc.StatusCode.FAILED_PRECONDITION,
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A table of embedding rows.

    Args:
        rows: number of rows on all servers, including replicas.
    """

    name: str
    dim: int
    rows: int


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


class WentBack(EdlError):
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
        self, addresses: Sequence[str], token: str, timeout: float = TIMEOUT_SECONDS,
        ca: str | os.PathLike[str] | None = None,
    ):  # fmt: skip
        if isinstance(addresses, str) or not addresses:
            raise EdlError(f"addresses: {addresses!r}: expected those of all servers, each host:port")
        self._addresses, self._timeout = tuple(addresses), timeout
        self._ca = tls.authority() if ca is None else os.fspath(ca)
        self._channels = [tls.channel(address, self._ca, OPTIONS) for address in addresses]
        self._stubs = [rpc.ParameterServerStub(channel) for channel in self._channels]
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._known: _Known | None = None
        self._newest: tuple[str, int] = "", 0  # newest run and generation seen; older ones are ignored

    def rows(self, table: str, ids: Any) -> np.ndarray:
        """Read the current rows of these ids, float32 [n, dim], in the order of `ids`.

        An id that was not learned yet has its initial row.

        Args:
            ids: integers [n]; for texts, see `text_ids`.
        """
        unique, places = np.unique(_checked(ids), return_inverse=True)
        most = max(PAGE_BYTES // (4 * self._table(table).dim), 1)  # a larger call would delay the workers
        pieces = [unique[start : start + most] for start in range(0, max(len(unique), 1), most)]
        found = [self._in_time(partial(self._pull, table, piece)) for piece in pieces]
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
            except WentBack:
                continue
            return Changed(np.concatenate(ids), np.concatenate(rows), pages.step, pages.mark, pages.whole)
        raise EdlError(
            f"table {table!r}: the servers went back {ATTEMPTS} times while it was read: try again"
        )

    def pages(self, table: str, since: str = "") -> Pages:
        """Like `changed`, but page by page, for large tables. Nothing is read before the first page is taken.

        Raises:
            WentBack: (raised by the pages) the servers have rolled back to a checkpoint: start again.
        """
        step, _, incarnation = since.partition("-")
        if since and not (incarnation and step.isdecimal()):
            raise EdlError(f"since: {since!r}: expected the mark of another `changed`, or none")
        known = self._in_time(self._find)
        number, about = self._numbered(table, known)
        whole = incarnation != known.incarnation
        # The last step can be undone, so its changes are requested again.
        first = 0 if whole else max(int(step) - 1, 0)
        request = pb.ListRequest(
            run_id=known.run_id, table=number, since=first,
            most=max(PAGE_BYTES // (8 + 4 * about.dim), 1), **known.expected,
        )  # fmt: skip
        now = min(known.steps)
        pages = partial(self._list, request, known, about.dim)
        return Pages(about.dim, now, f"{now}-{known.incarnation}", whole, pages)

    def tables(self) -> tuple[Table, ...]:
        """The existing tables, with their current numbers of rows."""
        return self._in_time(self._find).tables

    @property
    def step(self) -> int:
        """The step that all servers have reached."""
        return min(self._in_time(self._find).steps)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- calls

    def _pull(self, table: str, ids: np.ndarray, deadline: float) -> np.ndarray:
        """Pull the rows of these ids from their servers.

        Args:
            ids: int64 [n], each once.
        """
        known = self._known
        if known is None or known.is_old:
            known = self._find(deadline)
        number, about = self._numbered(table, known)
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
        for index, answer in self._ask("Pull", requests, known.until(deadline)).items():
            put(rows, shares.of(index), b"".join(answer.rows), index)
        return rows

    def _list(
        self, request: pb.ListRequest, known: _Known, dim: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the pages of a list request to all servers.

        Raises:
            WentBack: a server has rolled back to a checkpoint.
        """
        asked = {index: _copied(request) for index in known.of.members}
        while asked:
            for index, page in self._listed(known, dict(asked)).items():
                if page.incarnation != known.incarnations[index]:
                    raise WentBack(f"{self._name(index)} has rolled back to a checkpoint")
                ids = np.frombuffer(page.ids, IDS)
                if page.more:
                    asked[index].after = int(ids[-1])
                else:
                    del asked[index]
                yield ids, np.frombuffer(page.rows, VALUES).reshape(len(ids), dim)

    def _listed(self, known: _Known, asked: dict[int, pb.ListRequest]) -> dict[int, Any]:
        """Request the next page from each server.

        Raises:
            WentBack: other servers hold the rows now.
        """

        def act(deadline: float) -> dict[int, Any]:
            try:
                return self._ask("List", asked, known.until(deadline))
            except _NotYet as error:
                if known.of.copies > 1 and self._find(deadline).of != known.of:
                    raise WentBack(str(error)) from error
                raise

        return self._in_time(act)

    def _find(self, deadline: float) -> _Known:
        """Refresh the servers' states.

        Raises:
            _NotYet: the servers have no rows at present.
            EdlError: the addresses are not those of all servers.
        """
        count = len(self._stubs)
        found, of = self._described(deadline)
        for index, said in found.items():
            if said.index == index and said.servers != count and not said.position.empty:
                raise EdlError(
                    f"the rows are on {said.servers} parameter servers now, and {count} addresses were "
                    "given: expected the addresses of all, in the order of their numbers"
                )
            if said.index != index:
                raise EdlError(
                    f"{self._addresses[index]} is parameter server {said.index} of {said.servers}, and was "
                    f"given as {index} of {count}: expected the addresses of all, in the order of their "
                    "numbers"
                )
            if said.position.empty or not said.tables:
                raise _NotYet(f"{self._name(index)} has no rows yet: no worker has said what it is to have")
            first = min(found)
            if _what(said) != _what(found[first]):
                raise _NotYet(
                    f"{self._name(index)} is of another run than server {first}, or has other tables"
                )
        newest = max(said.position.generation for said in found.values())
        run_id, known = self._newest
        part = of.copies > 1 and len(found) < count  # only a server that is missing here can know better
        if part and run_id == found[min(found)].run_id and newest < known:
            raise _NotYet(
                f"{self._name(min(found))} was not in the last ring: it has rows of an earlier state"
            )
        self._newest = found[min(found)].run_id, newest
        self._known = _Known.made(found, of)
        return self._known

    def _described(self, deadline: float) -> tuple[dict[int, pb.Description], ShardAssignment]:
        """Get the states of the servers to read from, and the assignment of rows to these servers.

        These are all servers; if rows have replicas, the servers that answer, provided that these have all
        rows.

        Raises:
            _NotYet: a necessary server does not answer.
        """
        everybody = range(len(self._stubs))
        answered, hurried = threading.Event(), time.monotonic() + PATIENCE_SECONDS
        calls = {index: self._call("Describe", index, pb.DescribeRequest(), deadline) for index in everybody}
        for call in calls.values():
            call.add_done_callback(lambda _: answered.set())
        try:
            while True:
                answered.clear()
                found = {index: self._answer(index, call) for index, call in calls.items() if call.done()}
                of = self._assignment(found)
                if {*of.members} <= {*found}:
                    return {index: found[index] for index in of.members}, of
                here = of.without(tuple(index for index in everybody if index not in found))
                now = time.monotonic()
                if of.copies > 1 and now >= hurried and here.is_whole:
                    return {index: found[index] for index in here.members}, here
                answered.wait(max(min(hurried if now < hurried else deadline, deadline) - now, 0.001))
        finally:
            for call in calls.values():
                call.cancel()  # no effect on answered calls

    def _assignment(self, found: Mapping[int, pb.Description]) -> ShardAssignment:
        """The assignment of the rows, according to the servers of the newest generation."""
        count = len(self._stubs)
        told = [said for said in found.values() if not said.position.empty and said.assignment.replicas > 1]
        newest = max(
            told, key=lambda said: (said.position.generation, said.position.assigned_in), default=None
        )
        if newest is None or newest.assignment.servers != count:
            return ShardAssignment(count)
        # A server that has lost its log is out, even if the others do not know it yet.
        empty = [index for index, said in found.items() if said.position.empty or not said.tables]
        of = ShardAssignment.from_proto(newest.assignment).without(tuple(empty))
        return of if of.is_whole else ShardAssignment(count)

    def _table(self, name: str) -> Table:
        known = self._known
        if known is None or all(table.name != name for table in known.tables):
            known = self._in_time(self._find)
        return self._numbered(name, known)[1]

    def _numbered(self, name: str, known: _Known) -> tuple[int, Table]:
        for number, table in enumerate(known.tables):
            if table.name == name:
                return number, table
        names = ", ".join(repr(table.name) for table in known.tables)
        raise EdlError(f"unknown table {name!r}: the job has {names}")

    def _in_time(self, act: Callable[[float], T]) -> T:
        """Repeat `act` until it succeeds or the timeout has passed."""
        deadline = time.monotonic() + self._timeout
        said: _NotYet | None = None  # error of the attempt before
        while True:
            began = time.monotonic()
            try:
                return act(deadline)
            except _NotYet as error:
                self._known = None  # another run may have begun
                if time.monotonic() + PAUSE_SECONDS >= deadline:
                    # The error of an attempt with hardly any time left is less helpful than the one before.
                    why = error if said is None or deadline - began >= PATIENCE_SECONDS else said
                    raise EdlError(f"{why} (waited for {self._timeout:g} s)") from why.__cause__
                said = error
            time.sleep(PAUSE_SECONDS)

    def _ask(self, method: str, requests: Mapping[int, Any], deadline: float) -> dict[int, Any]:
        """Call these servers concurrently, and return their answers by index.

        Raises:
            _NotYet: a call failed temporarily.
        """
        calls = {index: self._call(method, index, one, deadline) for index, one in requests.items()}
        try:
            return {index: self._answer(index, call) for index, call in calls.items()}
        finally:
            for call in calls.values():
                call.cancel()  # no effect on answered calls

    def _call(self, method: str, index: int, request: Any, deadline: float) -> Any:
        return getattr(self._stubs[index], method).future(
            request, metadata=self._metadata, wait_for_ready=True,
            timeout=max(deadline - time.monotonic(), 0.0),
        )  # fmt: skip

    def _answer(self, index: int, call: Any) -> Any:
        try:
            return call.result()
        except grpc.RpcError as error:
            raise self._in_words(index, error) from error

    def _in_words(self, index: int, error: grpc.RpcError) -> Exception:
        code, words = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            words = tls.trouble(self._addresses[index], self._ca) or "it does not answer"
        text = f"{self._name(index)}: {words or code.name}"
        return _NotYet(text) if code in AWAY else EdlError(text)

    def _name(self, index: int) -> str:
        return f"parameter server {index} ({self._addresses[index]})"


class _NotYet(Exception):
    """A temporary failure: try again."""


@dataclass(frozen=True)
class _Known:
    """The last known states of the servers.

    Args:
        tables: the tables, in the order of their numbers.
        steps: step of each server.
        incarnations: incarnation of each server, by its index.
        of: the shard assignment.
    """

    run_id: str
    tables: tuple[Table, ...]
    steps: tuple[int, ...]
    incarnations: dict[int, str]
    of: ShardAssignment
    found_at: float

    @classmethod
    def made(cls, said: Mapping[int, pb.Description], of: ShardAssignment) -> _Known:
        tables = tuple(
            Table(each[0].name, each[0].dim, sum(one.rows for one in each))
            for each in zip(*(one.tables for one in said.values()), strict=True)
        )
        steps, incarnations = (
            (one.position.step for one in said.values()),
            {i: one.incarnation for i, one in said.items()},
        )
        return cls(said[min(said)].run_id, tables, tuple(steps), incarnations, of, time.monotonic())

    @property
    def is_old(self) -> bool:
        """Whether the assignment must be refreshed, because servers that are out do not know it."""
        return self.of.copies > 1 and time.monotonic() - self.found_at >= LOOK_SECONDS

    @property
    def expected(self) -> dict[str, Any]:
        """The fields of a request that name the assumed assignment."""
        if self.of.copies < 2:
            return {"servers": self.of.servers}
        return {"assignment": self.of.to_proto()}

    def until(self, deadline: float) -> float:
        """The time at which to stop waiting for a server that does not answer."""
        return deadline if self.of.copies < 2 else min(deadline, time.monotonic() + PATIENCE_SECONDS)

    @property
    def incarnation(self) -> str:
        """A digest of all servers' incarnations."""
        return hashlib.sha256("\n".join(self.incarnations.values()).encode()).hexdigest()[:16]


def _what(said: pb.Description) -> tuple[str, list[tuple[str, int]]]:
    return said.run_id, [(table.name, table.dim) for table in said.tables]


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
