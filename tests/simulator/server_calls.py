# SPDX-License-Identifier: Apache-2.0
"""Calls of simulated workers to parameter servers: the trainer's own links (trainer/ps_client/link.py), which
wait in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from edl.contract.proto import ps_pb2 as pb
from edl.errors import CheckpointError
from edl.trainer.ps_client.interfaces import PartNotWritten
from edl.trainer.ps_client.interrupt import Interrupt
from edl.trainer.ps_client.link import _ANSWERS, AWAY, ServerLink
from edl.trainer.ps_client.multiplex import Failed
from tests.simulator.server_processes import LATENCY, Place

if TYPE_CHECKING:
    from tests.simulator.worker import Sim


class SimInterrupt(Interrupt):
    """The interrupt of one worker's calls."""

    def __init__(self, w: Sim):
        super().__init__()
        self._w = w

    def cut(self) -> None:
        super().cut()
        self._w.fleet.does(self._w, 0, self._w.go_on)

    def wait(self, seconds: float) -> bool:
        self._w.waits(lambda: self.is_cut, seconds)
        return self.is_cut


class SimLink(ServerLink):
    """The link of one worker to one server."""

    def __init__(self, w: Sim, place: Place, interrupt: Interrupt, patience: float | None):
        super().__init__(place.index, place.address, "token", interrupt, lambda: w.clock.now, patience)
        self.w, self.place = w, place

    @property
    def _stub(self) -> Any:
        return _Stub(self)

    def connect_anew(self) -> None: ...

    def trouble(self) -> str:
        return ""

    def start(self, method: str, request: Any) -> Any:
        future = Asked(self, method, request)
        self.interrupt.begins(future)
        return future

    def write_part(self, request: pb.WritePartRequest) -> Any:
        call = Asked(self, "WritePart", request)
        self.interrupt.begins(call)
        return Writing(self, call)

    def tell(self, method: str, request: Any) -> None:
        Asked(self, method, request)


class _Stub:
    """The stub for a link's own requests, beside its calls."""

    def __init__(self, link: SimLink):
        self._link = link

    def Describe(self, request: Any, metadata: object, timeout: float) -> Any:
        return self._ask("Describe", request, timeout)

    def Probe(self, request: Any, metadata: object, timeout: float) -> Any:
        return self._ask("Probe", request, timeout)

    def _ask(self, method: str, request: Any, timeout: float) -> Any:
        asked = Asked(self._link, method, request)
        try:
            return asked.result(timeout)
        except grpc.FutureTimeoutError:
            raise Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded") from None


class Asked:
    """A call. The request and its answer each arrive a little later."""

    def __init__(self, link: SimLink, method: str, request: Any):
        self._w, self._method = link.w, method
        self._answer: bytes | Failed | None = None
        self._cancelled = False
        self.taken = False  # whether a long call has begun
        servers, raw = link.place.servers, request.SerializeToString()
        assignment = servers.speaks(link.w, link.place, method, request)

        def arrives() -> None:
            servers.called(link.place, method)
            link.place.ask(method, raw, answered, lambda: self._later(self._is_taken))

        def answered(answer: bytes | Failed) -> None:
            servers.answered(link.place, method, request, answer, assignment)
            self._later(lambda: self._comes_back(answer))

        servers.clock.later(servers.random.expovariate(LATENCY), arrives)

    def _later(self, act: Callable[[], None]) -> None:
        servers = self._w.fleet.world.servers
        assert servers is not None
        self._w.fleet.does(self._w, servers.random.expovariate(LATENCY), act)

    def _is_taken(self) -> None:
        self.taken = True
        self._w.go_on()

    def _comes_back(self, answer: bytes | Failed) -> None:
        if not self._cancelled:
            self._answer = answer
            self._w.go_on()

    @property
    def done(self) -> bool:
        return self._cancelled or self._answer is not None

    def cancel(self) -> None:
        """Cancel the call, unless it is answered."""
        if not self.done:
            self._cancelled = True
            self._w.fleet.does(self._w, 0, self._w.go_on)

    def result(self, timeout: float | None = None) -> Any:
        self._w.waits(lambda: self.done, timeout)
        return self.now()

    def now(self) -> Any:
        """Return the result like a future, without waiting."""
        if self._cancelled:
            raise grpc.FutureCancelledError
        if self._answer is None:
            raise grpc.FutureTimeoutError
        if isinstance(self._answer, Failed):
            raise self._answer
        return _ANSWERS[self._method](self._answer)


class Writing:
    """A checkpoint part that a server writes (the counterpart of `link.WritePart` in the trainer)."""

    def __init__(self, link: SimLink, call: Asked):
        self._link, self._call = link, call

    def captured(self) -> None:
        self._link.w.waits(lambda: self._call.taken or self._call.done)
        self._link.interrupt.ends(self._call)
        if self._call.done and not self._call.taken:
            self.written()

    def written(self) -> Any:
        w = self._link.w
        w.waits_beside(lambda: self._call.done)
        try:
            written = self._call.now()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            away = isinstance(error, grpc.FutureCancelledError) or error.code() in AWAY
            what = PartNotWritten if away else CheckpointError
            raise what(f"{self._link.name} did not write its part: {error}") from None
        if written.why:
            raise CheckpointError(f"{self._link.name} did not write its part: {written.why}")
        return written

    def forget(self) -> None:
        self._call.cancel()
        self._link.interrupt.ends(self._call)
