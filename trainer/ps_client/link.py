# SPDX-License-Identifier: Apache-2.0
"""One worker's link to one parameter server.

Promise: a call ends with the server's answer; with `RingBroken`, as soon as the ring is cut or the server is
found to have lost state that the ring relies on; or with the server's message, if it rejects the request. A
server that is down, slow or hanging is waited for: it resumes with its state, and the master limits the wait.
A request that fails because a checkpoint cannot be read is repeated for a minute. Every request can be
repeated: the second one changes nothing.

The channel is created by the first call, in the process that calls, because gRPC does not survive a fork.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

import grpc

from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc as rpc
from edl.contract.rows.shares import OPTIONS
from edl.errors import CheckpointError
from edl.net import tls
from edl.trainer.ps_client.calls import Request, ServerAway, ServerRefused, TokenRefused
from edl.trainer.ps_client.interfaces import PartNotWritten
from edl.trainer.ps_client.interrupt import Interrupt
from edl.trainer.ps_client.multiplex import Conversation
from edl.trainer.ring.base import RingBroken
from edl.trainer.runtime.log import log

SERVICE = "edl.ParameterServer"
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 1.0
LOOK_SECONDS = 1.0  # interval at which an unanswered call is examined
TOLD_SECONDS = 5.0  # wait after which the log names the server
DESCRIBE_SECONDS = 2.0
UNREADABLE_SECONDS = 60.0  # for an unavailable store to recover
TELL_SECONDS = 30.0
AWAY = {  # statuses of a call when the server is down, shuts down, or is cut off
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
}
# Longest wait for a server in these calls: it may be new, so it is not known to hold rows.
LIMITS = {"Declare": 60.0, "Fetch": 60.0}
LONG = ("Fetch", "Assign", "Restore", "Begin")  # calls during which a server answers no other calls

UNREADABLE = grpc.StatusCode.DATA_LOSS  # the server cannot read a checkpoint

_ANSWERS: dict[str, Callable[[bytes], Any]] = {  # parser of the answer, by method
    method.name: getattr(pb, method.output_type.name).FromString
    for method in pb.DESCRIPTOR.services_by_name["ParameterServer"].methods
}


class ServerLink:
    """One server.

    Args:
        index: the index of the server.
        address: host:port.
        token: the job's token.
        interrupt: cancels the calls.
        clock: monotonic seconds.
        patience: seconds after which a silent server counts as away; a refused connection counts at once.
            None: wait forever.
    """

    def __init__(
        self,
        index: int,
        address: str,
        token: str,
        interrupt: Interrupt,
        clock: Callable[[], float] = time.monotonic,
        patience: float | None = None,
    ):
        self.index, self.patience = index, patience
        self.name = f"parameter server {index} ({address})"
        self._address, self.interrupt, self.clock = address, interrupt, clock
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._told = set[Any]()  # calls whose answers are ignored
        self._conversation: Conversation | None = None  # the newest
        self._conversing = threading.Lock()

    @cached_property
    def _channel(self) -> grpc.Channel:
        # A private connection pool: a shared one would inherit the reconnect back-off of an earlier channel.
        options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        return tls.channel(self._address, tls.authority(), options)

    @cached_property
    def _stub(self) -> rpc.ParameterServerStub:
        return rpc.ParameterServerStub(self._channel)

    def connect_anew(self) -> None:
        """Use a new connection from the next call on. Running calls keep the present one."""
        with self._conversing:
            if self._conversation is not None:
                self._conversation.close()
            self._conversation = None
        self.__dict__.pop("_channel", None)
        self.__dict__.pop("_stub", None)

    def begin(self, method: str, request: Request, generation: int | None = None) -> Call:
        return Call(self, method, request, generation)

    def write_part(self, request: pb.WritePartRequest) -> WritePart:
        # Without a deadline: a large shard takes long. A server answers if its store hangs (edl/checkpoints),
        # and keepalive ends the call if the server itself is lost or hangs.
        # Called as a streaming method: in Python, gRPC returns the initial metadata of a unary call only
        # together with its answer.
        call = self._channel.unary_stream(
            f"/{SERVICE}/WritePart", pb.WritePartRequest.SerializeToString, pb.Written.FromString
        )(request, metadata=self._metadata)
        self.interrupt.begins(call)
        return WritePart(self, call)

    def tell(self, method: str, request: Request) -> None:
        future = getattr(self._stub, method).future(request, metadata=self._metadata, timeout=TELL_SECONDS)
        self._told.add(future)  # gRPC cancels a call without references
        future.add_done_callback(self._told.discard)

    # --- for its calls

    def start(self, method: str, request: Request) -> Any:
        with self._conversing:
            if self._conversation is None or self._conversation.has_ended:
                self._conversation = Conversation(self._channel, self._metadata)
            conversation = self._conversation
        future = conversation.ask(method, request.SerializeToString(), _ANSWERS[method])
        self.interrupt.begins(future)
        return future

    def cut(self) -> RingBroken:
        return RingBroken(f"the ring was cut while waiting for {self.name}")

    def is_still_in(self, generation: int) -> None:
        """Check that the server is not known to be in a different generation.

        Raises:
            RingBroken: it is.
        """
        with suppress(grpc.RpcError):
            position = self._stub.Describe(
                pb.DescribeRequest(), metadata=self._metadata, timeout=DESCRIBE_SECONDS
            ).position
            if position.generation > generation:
                raise RingBroken(f"{self.name} is in generation {position.generation} already")
            if position.generation < generation:
                what = "nothing" if position.empty else f"the state of step {position.step:,}"
                raise RingBroken(f"{self.name} has come back with {what}: it has lost its log")

    def probed(self, within: float) -> pb.Probed | None:
        """Probe the server: numbers of completed and queued calls. None: it does not answer.

        Args:
            within: seconds.

        Raises:
            RpcError: the server answers with an error.
        """
        try:
            return self._stub.Probe(pb.ProbeRequest(), metadata=self._metadata, timeout=within)
        except grpc.RpcError as error:
            if error.code() in AWAY:
                return None
            raise

    def refused(self, error: grpc.RpcError, method: str, unreadable: float = 0.0) -> None:
        """Raise the error that a failed call means; return if the call must be repeated.

        Args:
            unreadable: seconds since the call first failed because a checkpoint cannot be read.

        Raises:
            RingBroken: the ring was cut, or the server is at a different step or knows no tables.
            TokenRefused: the server rejects the token.
            ServerRefused: the server rejects the request.
        """
        code, words = error.code(), error.details()
        if self.interrupt.is_cut:
            raise self.cut() from error
        if code in AWAY or (code is UNREADABLE and unreadable < UNREADABLE_SECONDS):
            return
        # The server is at another step or knows no tables: the next root resolves that.
        misplaced = code is grpc.StatusCode.FAILED_PRECONDITION and method != "Declare"
        if code is grpc.StatusCode.ABORTED or misplaced:
            raise RingBroken(f"{self.name}: {words}") from error
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise TokenRefused(f"{self.name}: {words}") from error
        raise ServerRefused(f"{self.name}: {words or code.name}") from error

    def trouble(self) -> str:
        """The TLS problem between worker and server, if there is one; otherwise empty."""
        return tls.trouble(self._address, tls.authority())


class Busy:
    """Tell a busy server from a hanging one.

    Args:
        patience: seconds; a server that completes none of its queued calls for so long hangs.
    """

    def __init__(self, link: ServerLink, patience: float):
        self._link, self._patience = link, patience
        self._done, self._since = -1, link.clock()

    def look(self) -> bool:
        try:
            probed = self._link.probed(self._patience)
        except grpc.RpcError:
            return True
        if probed is None:
            return False
        if not probed.waiting or probed.done != self._done:
            self._done, self._since = probed.done, self._link.clock()
        return self._link.clock() - self._since < self._patience


class Call:
    """A call that is repeated until it is answered."""

    def __init__(self, link: ServerLink, method: str, request: Request, generation: int | None):
        self._link, self._method, self._request, self._generation = link, method, request, generation
        self._future = link.start(method, request)
        self._began_at = self._asked_at = link.clock()
        self._told = False
        self._others: Callable[[], None] = lambda: None

    def result(
        self, wait_forever: bool = False, look: Callable[[], None] = lambda: None, within: float = math.inf
    ) -> Any:
        self._asked_at = self._link.clock()
        self._others = look
        try:
            return self._result(wait_forever, within)
        finally:
            self._link.interrupt.waits_no_more(self)

    def check(self) -> None:
        try:
            self._future.result(timeout=0)
        except grpc.RpcError as error:
            self._link.refused(error, self._method)
            self._future = self._link.start(self._method, self._request)  # the server was away
        except (grpc.FutureTimeoutError, grpc.FutureCancelledError):
            if self._generation is not None:
                self._link.is_still_in(self._generation)

    def _result(self, wait_forever: bool, within: float) -> Any:
        link, pause = self._link, FIRST_PAUSE_SECONDS
        patience, anew = None if wait_forever else link.patience, False
        limit = within if wait_forever else LIMITS.get(self._method, within)
        unreadable_at: float | None = None  # since when
        away_at: float | None = None
        while True:
            try:
                answer = self._answer(patience)
            except grpc.RpcError as error:
                now = link.clock()
                if error.code() is UNREADABLE and unreadable_at is None:
                    unreadable_at = now
                link.refused(error, self._method, 0.0 if unreadable_at is None else now - unreadable_at)
                away = patience is not None and error.code() is not UNREADABLE
                if away and anew:
                    why = error.details() or error.code().name
                    raise ServerAway(f"{link.name} is away: {why}") from error
                if away:
                    # A failed channel reconnects only after a pause, and the server may be up already.
                    link.connect_anew()
                    self._future, anew = link.start(self._method, self._request), True
                    continue
                why = error.details() or error.code().name
                away_at = link.clock() if away_at is None else away_at
                if error.code() is not UNREADABLE and link.clock() - away_at >= limit:
                    raise ServerAway(f"{link.name} is away for {limit:.0f} s: {why}") from error
                self._tell(why)
            else:
                if self._told:
                    log.info(f"{link.name} answered after {link.clock() - self._began_at:.1f} s")
                return answer
            if link.interrupt.wait(pause):
                raise link.cut()
            self._look()
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._future = link.start(self._method, self._request)

    def forget(self) -> None:
        self._future.cancel()  # no effect after the answer
        self._link.interrupt.ends(self._future)

    def _answer(self, patience: float | None) -> Any:
        """Wait for the answer of the present attempt.

        Raises:
            RingBroken: the ring was cut.
            ServerAway: the server does not answer.
            RpcError: the call has failed.
        """
        busy = None if patience is None or self._method in LONG else Busy(self._link, patience)
        try:
            while True:
                try:
                    return self._future.result(timeout=LOOK_SECONDS)
                except grpc.FutureTimeoutError:
                    self._tell("")
                    if busy is not None and not busy.look():
                        raise ServerAway(f"{self._link.name} does not answer") from None
                    self._look()
        except grpc.FutureCancelledError as error:
            raise self._link.cut() from error
        finally:
            self.forget()

    def _look(self) -> None:
        self._others()
        if self._generation is not None:
            self._link.is_still_in(self._generation)

    def _tell(self, why: str) -> None:
        """Report a long wait to the heartbeats and the log.

        Args:
            why: error of the last attempt; empty: no answer yet.
        """
        if self._link.clock() - self._asked_at >= LOOK_SECONDS:
            self._link.interrupt.waits_for(self, self._link.index, self._method, self._asked_at, why)
        waited = self._link.clock() - self._began_at
        if not self._told and waited >= TOLD_SECONDS:
            self._told = True
            why = self._link.trouble() or why or "it does not answer"
            log.warning(f"{self._link.name} is pending for {waited:.0f} s ({self._method}): {why}")


class WritePart:
    """A shard of a checkpoint that the server is writing."""

    def __init__(self, link: ServerLink, call: Any):
        self._link, self._call = link, call

    def captured(self) -> None:
        self._call.initial_metadata()  # returns or raises: keepalive or a cut ends the call
        self._link.interrupt.ends(self._call)
        if self._call.done() and self._call.code() is not grpc.StatusCode.OK:
            self.written()

    def written(self) -> pb.Written:
        try:
            answers = [*self._call]
        except grpc.RpcError:
            code = self._call.code()
            what = PartNotWritten if code in AWAY else CheckpointError
            why = f"{code.name}: {self._call.details()}"
            raise what(f"{self._link.name} did not write its part: {why}") from None
        if len(answers) != 1 or answers[0].why:
            why = answers[0].why if answers else "no answer"
            raise CheckpointError(f"{self._link.name} did not write its part: {why}")
        return answers[0]

    def forget(self) -> None:
        self._call.cancel()  # no effect after the answer
        self._link.interrupt.ends(self._call)
