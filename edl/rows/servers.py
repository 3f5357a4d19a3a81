# SPDX-License-Identifier: Apache-2.0
"""The servers as a reader knows them: their states, the assignment of rows to them, and calls with retries.

A reader learns of restored, resharded and replaced servers only by asking. So the states are refreshed when a
call fails for a reason that may pass, and from time to time if rows have replicas.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc as rpc
from edl.contract.rows.placement import ShardAssignment
from edl.contract.rows.shares import OPTIONS
from edl.errors import EdlError
from edl.net import tls

T = TypeVar("T")
PAUSE_SECONDS = 0.05  # between two attempts
PATIENCE_SECONDS = 1.0  # wait for a server that is down, if a second server holds its rows
LOOK_SECONDS = 1.0  # then the assignment of rows with replicas is refreshed: a server that is out is unaware
# Statuses of a call when the server is down, or has no rows at present.
AWAY = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.FAILED_PRECONDITION,
}


@dataclass(frozen=True)
class Table:
    """A table of embedding rows.

    Args:
        rows: number of rows on all servers, including replicas.
    """

    name: str
    dim: int
    rows: int


class NotYet(Exception):
    """A temporary failure: try again."""


@dataclass(frozen=True)
class Known:
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
    def made(cls, said: Mapping[int, pb.Description], of: ShardAssignment) -> Known:
        """The states that these servers have described, by index."""
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


class Servers:
    """All servers of one job, for calls that only read. Thread-safe.

    Args:
        addresses: host:port of all servers, in the order of their numbers.
        token: the job's read token, or the job's own token.
        timeout: seconds that a call waits for servers that are down.
        ca: file of the authority of the servers' certificates; None: EDL_TLS_CA.

    Raises:
        EdlError: addresses are missing.
    """

    def __init__(
        self, addresses: Sequence[str], token: str, timeout: float, ca: str | os.PathLike[str] | None
    ):
        if isinstance(addresses, str) or not addresses:
            raise EdlError(f"addresses: {addresses!r}: expected those of all servers, each host:port")
        self._addresses, self._timeout = tuple(addresses), timeout
        self._ca = tls.authority() if ca is None else os.fspath(ca)
        self._channels = [tls.channel(address, self._ca, OPTIONS) for address in addresses]
        self._stubs = [rpc.ParameterServerStub(channel) for channel in self._channels]
        self._metadata = (("authorization", f"Bearer {token}"),)
        self.known: Known | None = None
        self._newest: tuple[str, int] = "", 0  # newest run and generation seen; older ones are ignored

    def close(self) -> None:
        """Close the connections; no call can be made any more."""
        for channel in self._channels:
            channel.close()

    def find(self, deadline: float) -> Known:
        """Refresh the servers' states.

        Raises:
            NotYet: the servers have no rows at present.
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
                raise NotYet(f"{self.name(index)} has no rows yet: no worker has said what it is to have")
            first = min(found)
            if _what(said) != _what(found[first]):
                raise NotYet(f"{self.name(index)} is of another run than server {first}, or has other tables")
        newest = max(said.position.generation for said in found.values())
        run_id, known = self._newest
        part = of.copies > 1 and len(found) < count  # only a server that is missing here can know better
        if part and run_id == found[min(found)].run_id and newest < known:
            raise NotYet(f"{self.name(min(found))} was not in the last ring: it has rows of an earlier state")
        self._newest = found[min(found)].run_id, newest
        self.known = Known.made(found, of)
        return self.known

    def _described(self, deadline: float) -> tuple[dict[int, pb.Description], ShardAssignment]:
        """Get the states of the servers to read from, and the assignment of rows to these servers.

        These are all servers; if rows have replicas, the servers that answer, provided that these have all
        rows.

        Raises:
            NotYet: a necessary server does not answer.
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

    def table(self, name: str) -> Table:
        """The table with this name. The servers are asked only if it is not known yet."""
        known = self.known
        if known is None or all(table.name != name for table in known.tables):
            known = self.in_time(self.find)
        return self.numbered(name, known)[1]

    def numbered(self, name: str, known: Known) -> tuple[int, Table]:
        """The table with this name, and its number in requests.

        Raises:
            EdlError: the job has no such table.
        """
        for number, table in enumerate(known.tables):
            if table.name == name:
                return number, table
        names = ", ".join(repr(table.name) for table in known.tables)
        raise EdlError(f"unknown table {name!r}: the job has {names}")

    def in_time(self, act: Callable[[float], T]) -> T:
        """Repeat `act` until it succeeds or the timeout has passed.

        Raises:
            EdlError: the timeout has passed; the message is that of the last attempt that could tell the
                reason.
        """
        deadline = time.monotonic() + self._timeout
        said: NotYet | None = None  # error of the attempt before
        while True:
            began = time.monotonic()
            try:
                return act(deadline)
            except NotYet as error:
                self.known = None  # another run may have begun
                if time.monotonic() + PAUSE_SECONDS >= deadline:
                    # The error of an attempt with hardly any time left is less helpful than the one before.
                    why = error if said is None or deadline - began >= PATIENCE_SECONDS else said
                    raise EdlError(f"{why} (waited for {self._timeout:g} s)") from why.__cause__
                said = error
            time.sleep(PAUSE_SECONDS)

    def ask(self, method: str, requests: Mapping[int, Any], deadline: float) -> dict[int, Any]:
        """Call these servers concurrently, and return their answers by index.

        Raises:
            NotYet: a call failed temporarily.
        """
        calls = {index: self._call(method, index, one, deadline) for index, one in requests.items()}
        try:
            return {index: self._answer(index, call) for index, call in calls.items()}
        finally:
            for call in calls.values():
                call.cancel()  # no effect on answered calls

    def _call(self, method: str, index: int, request: Any, deadline: float) -> Any:
        return getattr(self._stubs[index], method).future(
            request,
            metadata=self._metadata,
            wait_for_ready=True,
            timeout=max(deadline - time.monotonic(), 0.0),
        )

    def _answer(self, index: int, call: Any) -> Any:
        try:
            return call.result()
        except grpc.RpcError as error:
            raise self._in_words(index, error) from error

    def _in_words(self, index: int, error: grpc.RpcError) -> Exception:
        code, words = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            words = tls.trouble(self._addresses[index], self._ca) or "it does not answer"
        text = f"{self.name(index)}: {words or code.name}"
        return NotYet(text) if code in AWAY else EdlError(text)

    def name(self, index: int) -> str:
        """The name of a server in messages."""
        return f"parameter server {index} ({self._addresses[index]})"


def _what(said: pb.Description) -> tuple[str, list[tuple[str, int]]]:
    return said.run_id, [(table.name, table.dim) for table in said.tables]
