"""One parameter server, as a worker calls it.

Promise: a call ends with the server's answer, with `RingBroken` as soon as the ring is called off or the
server is found to have lost what the ring knows it had, or with the server's own words, if it refuses what is
asked. A server that is away, is slow, or hangs is waited for: it comes back with all that it had, and the
master says when that is to end. One that cannot read a checkpoint is asked again for a minute. Whatever is
asked may be asked again: the second time it changes nothing.

The channel is made with the first call, so in the process that calls: gRPC does not survive a fork.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import grpc

from edl.contract.heartbeats import ServerWait
from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc as rpc
from edl.contract.rows.shares import OPTIONS
from edl.errors import CheckpointError, EdlError
from edl.net import tls
from edl.trainer.ps_client.interfaces import PartNotWritten
from edl.trainer.ps_client.multiplex import Conversation
from edl.trainer.ring.base import RingBroken
from edl.trainer.runtime.log import log

SERVICE = "edl.ParameterServer"
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 1.0
LOOK_SECONDS = 1.0  # after which a call that has no answer is looked into, again and again
TOLD_SECONDS = 5.0  # after which people are told whom it waits for
DESCRIBE_SECONDS = 2.0
UNREADABLE_SECONDS = 60.0  # for a store that is away to come back
TELL_SECONDS = 30.0
PART_SECONDS = 7200.0  # for a server to write its part of a checkpoint: its store may hang, and never fail
AWAY = {  # what a call fails with when the server is away, ends, or was cut off
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
}  # fmt: skip
# How long a server may be away that is called so, with rows of which nobody knows yet that it has them.
LIMITS = {"Declare": 60.0, "Fetch": 60.0}
LONG = ("Fetch", "Arrange", "Restore", "Begin")  # calls during which a server answers nothing else

UNREADABLE = grpc.StatusCode.DATA_LOSS  # a checkpoint, by the server

Request: TypeAlias = Any  # a message of ps.proto
_ANSWERS: dict[str, Callable[[bytes], Any]] = {  # of each call, what reads its answer
    method.name: getattr(pb, method.output_type.name).FromString
    for method in pb.DESCRIPTOR.services_by_name["ParameterServer"].methods
}


class ServerRefused(EdlError):
    """A parameter server refuses what it is asked, and would refuse it again."""


class ServerAway(Exception):
    """It does not answer, and others have its rows, or nobody knows of any that it has."""


class TokenRefused(Exception):
    """A parameter server does not know this worker's token any more: one that has the new one goes on."""


class Interrupt:
    """Breaks calls off, and knows which of them are waited for: from any thread."""

    def __init__(self) -> None:
        self._lock, self._running = threading.Lock(), dict[Any, None]()
        # Of calls: since when, for which server, for what, and why.
        self._waiting: dict[Any, tuple[float, int, str, str]] = {}
        self._is_cut = threading.Event()

    def arm(self) -> None:
        """From now on calls are possible again."""
        self._is_cut.clear()

    def cut(self) -> None:
        """All calls that run end now, and all that begin later, until it is armed again."""
        self._is_cut.set()
        with self._lock:
            running = list(self._running)
        for call in running:
            call.cancel()

    @property
    def is_cut(self) -> bool:
        return self._is_cut.is_set()

    def wait(self, seconds: float) -> bool:
        """Returns at once, and True, when it is cut."""
        return self._is_cut.wait(seconds)

    def begins(self, call: Any) -> None:
        with self._lock:
            self._running[call] = None
        if self._is_cut.is_set():
            call.cancel()

    def ends(self, call: Any) -> None:
        with self._lock:
            self._running.pop(call, None)

    def waits_for(self, call: Any, server: int, method: str, since: float, why: str) -> None:
        """A call has had no answer for a while, or only ones after which it is made again.

        Args:
            why: what the last attempt failed with; empty: it has no answer yet.
        """
        with self._lock:
            self._waiting[call] = since, server, method, why

    def waits_no_more(self, call: Any) -> None:
        with self._lock:
            self._waiting.pop(call, None)

    def longest(self, now: float) -> ServerWait | None:
        """Of those that wait, the one that has waited longest."""
        with self._lock:
            found = min(self._waiting.values(), default=None)
        return None if found is None else ServerWait(found[1], found[2], now - found[0], found[3])


class Pending(Protocol):
    """A call that was begun."""

    def result(
        self, patient: bool = False, look: Callable[[], None] = lambda: None, within: float = math.inf
    ) -> Any:
        """The answer. Raises: RingBroken, ServerRefused; where others have its rows, ServerAway.

        Args:
            patient: it is waited for in any case.
            within: seconds; for so long, if it is away. Then ServerAway is raised.
            look: is called now and then meanwhile, and may raise.
        """
        ...

    def check(self) -> None:
        """Call the server again if it was away, without waiting for the answer.

        Raises:
            RingBroken, ServerRefused: the server has refused the call, or has lost its state.
        """
        ...

    def forget(self) -> None:
        """Nobody waits for the answer any more."""
        ...


class Writing(Protocol):
    """A part of a checkpoint that a server writes."""

    def taken(self) -> None:
        """Wait until the server has taken the state. Raises: CheckpointError, PartNotWritten."""
        ...

    def written(self) -> pb.Written:
        """Wait until it is written. Raises: CheckpointError, PartNotWritten."""
        ...

    def forget(self) -> None:
        """The part is not needed any more."""
        ...


class Link(Protocol):
    """One server: what `ServerLink` is, and the simulator's."""

    def begin(self, method: str, request: Request, generation: int | None = None) -> Pending:
        """Call it. Returns at once.

        Args:
            method: of `ParameterServer`.
            generation: in which the server is known to be, all through the call; None: that is not known.
        """
        ...

    def write_part(self, request: pb.WritePartRequest) -> Writing:
        """Have it write its part of a checkpoint. Once: what it took later would be another state."""
        ...

    def tell(self, method: str, request: Request) -> None:
        """Call it, and do not wait for the answer."""
        ...


class ServerLink:
    """One server.

    Args:
        index: of it.
        address: host:port.
        token: the job's.
        interrupt: breaks the calls off.
        clock: seconds, never going back.
        patience: seconds after which it counts as away, and at once if nobody listens there; None: it is
            waited for.
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
        self._index, self.patience = index, patience
        self.name = f"parameter server {index} ({address})"
        self._address, self._interrupt, self._clock = address, interrupt, clock
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._told = set[Any]()  # calls whose answers nobody waits for
        self._conversation: Conversation | None = None  # the newest
        self._conversing = threading.Lock()

    @cached_property
    def _channel(self) -> grpc.Channel:
        # With connections of its own: else another one to that address has the pauses of the one before it.
        options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        return tls.channel(self._address, tls.authority(), options)

    @cached_property
    def _stub(self) -> rpc.ParameterServerStub:
        return rpc.ParameterServerStub(self._channel)

    def connect_anew(self) -> None:
        """With the next call. Calls that others have begun are answered on the connection that there was."""
        with self._conversing:
            if self._conversation is not None:
                self._conversation.close()
            self._conversation = None
        self.__dict__.pop("_channel", None)
        self.__dict__.pop("_stub", None)

    def begin(self, method: str, request: Request, generation: int | None = None) -> Call:
        return Call(self, method, request, generation)

    def write_part(self, request: pb.WritePartRequest) -> WritePart:
        # Called as if it had many answers: gRPC's Python gives the initial metadata of one that has a single
        # one only together with it.
        call = self._channel.unary_stream(
            f"/{SERVICE}/WritePart", pb.WritePartRequest.SerializeToString, pb.Written.FromString
        )(request, metadata=self._metadata, timeout=PART_SECONDS)
        self._interrupt.begins(call)
        return WritePart(self, call)

    def tell(self, method: str, request: Request) -> None:
        future = getattr(self._stub, method).future(request, metadata=self._metadata, timeout=TELL_SECONDS)
        self._told.add(future)  # gRPC cancels what nobody holds
        future.add_done_callback(self._told.discard)

    # --- of its calls

    def start(self, method: str, request: Request) -> Any:
        with self._conversing:
            if self._conversation is None or self._conversation.has_ended:
                self._conversation = Conversation(self._channel, self._metadata)
            conversation = self._conversation
        future = conversation.ask(method, request.SerializeToString(), _ANSWERS[method])
        self._interrupt.begins(future)
        return future

    def ended(self, future: Any) -> None:
        self._interrupt.ends(future)

    def is_waiting(self, call: Call, method: str, since: float, why: str) -> None:
        """A call has had no answer for a while. Args: as of `Interrupt.waits_for`."""
        self._interrupt.waits_for(call, self._index, method, since, why)

    def waits_no_more(self, call: Call) -> None:
        self._interrupt.waits_no_more(call)

    def waits(self, seconds: float) -> None:
        """Raises: RingBroken."""
        if self._interrupt.wait(seconds):
            raise self.cut()

    def cut(self) -> RingBroken:
        return RingBroken(f"the ring was cut while {self.name} was waited for")

    def is_still_in(self, generation: int) -> None:
        """Raises RingBroken if it is known not to be."""
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
        """What it has done, and what it has to do; None: it does not answer.

        Args:
            within: seconds.

        Raises:
            RpcError: it answers, and does not say.
        """
        try:
            return self._stub.Probe(pb.ProbeRequest(), metadata=self._metadata, timeout=within)
        except grpc.RpcError as error:
            if error.code() in AWAY:
                return None
            raise

    def refused(self, error: grpc.RpcError, method: str, unreadable: float = 0.0) -> None:
        """What it means that a call has failed; returns if it is to be made again.

        Args:
            unreadable: seconds for which it has failed because a checkpoint cannot be read.
        """
        code, words = error.code(), error.details()
        if self._interrupt.is_cut:
            raise self.cut() from error
        if code in AWAY or (code is UNREADABLE and unreadable < UNREADABLE_SECONDS):
            return
        # Of a step that it is not at, or of tables that it does not know: the next root settles that.
        misplaced = code is grpc.StatusCode.FAILED_PRECONDITION and method != "Declare"
        if code is grpc.StatusCode.ABORTED or misplaced:
            raise RingBroken(f"{self.name}: {words}") from error
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise TokenRefused(f"{self.name}: {words}") from error
        raise ServerRefused(f"{self.name}: {words or code.name}") from error

    def trouble(self) -> str:
        """Why they do not understand each other, if that is because of TLS; empty: it is not."""
        return tls.trouble(self._address, tls.authority())

    @property
    def now(self) -> float:
        return self._clock()


class Busy:
    """Whether a server that does not answer is busy with what others have asked.

    Args:
        patience: seconds. One that has done nothing of what waits for so long hangs.
    """

    def __init__(self, link: ServerLink, patience: float):
        self._link, self._patience = link, patience
        self._done, self._since = -1, link.now

    def look(self) -> bool:
        try:
            probed = self._link.probed(self._patience)
        except grpc.RpcError:
            return True
        if probed is None:
            return False
        if not probed.waiting or probed.done != self._done:
            self._done, self._since = probed.done, self._link.now
        return self._link.now - self._since < self._patience


class Call:
    """A call that is made again until it is answered."""

    def __init__(self, link: ServerLink, method: str, request: Request, generation: int | None):
        self._link, self._method, self._request, self._generation = link, method, request, generation
        self._future = link.start(method, request)
        self._began_at = self._asked_at = link.now
        self._told = False
        self._others: Callable[[], None] = lambda: None

    def result(
        self, patient: bool = False, look: Callable[[], None] = lambda: None, within: float = math.inf
    ) -> Any:
        self._asked_at = self._link.now
        self._others = look
        try:
            return self._result(patient, within)
        finally:
            self._link.waits_no_more(self)

    def check(self) -> None:
        try:
            self._future.result(timeout=0)
        except grpc.RpcError as error:
            self._link.refused(error, self._method)
            self._future = self._link.start(self._method, self._request)  # it was away
        except (grpc.FutureTimeoutError, grpc.FutureCancelledError):
            if self._generation is not None:
                self._link.is_still_in(self._generation)

    def _result(self, patient: bool, within: float) -> Any:
        link, pause = self._link, FIRST_PAUSE_SECONDS
        patience, anew = None if patient else link.patience, False
        limit = within if patient else LIMITS.get(self._method, within)
        unreadable_at: float | None = None  # since when
        away_at: float | None = None
        while True:
            try:
                answer = self._answer(patience)
            except grpc.RpcError as error:
                if error.code() is UNREADABLE and unreadable_at is None:
                    unreadable_at = link.now
                link.refused(error, self._method, 0.0 if unreadable_at is None else link.now - unreadable_at)
                away = patience is not None and error.code() is not UNREADABLE
                if away and anew:
                    why = error.details() or error.code().name
                    raise ServerAway(f"{link.name} is away: {why}") from error
                if away:
                    # A channel that has failed tries again only after a pause, and the server may be back.
                    link.connect_anew()
                    self._future, anew = link.start(self._method, self._request), True
                    continue
                why = error.details() or error.code().name
                away_at = link.now if away_at is None else away_at
                if error.code() is not UNREADABLE and link.now - away_at >= limit:
                    raise ServerAway(f"{link.name} is away for {limit:.0f} s: {why}") from error
                self._tell(why)
            else:
                if self._told:
                    log.info(f"{link.name} answers again after {link.now - self._began_at:.1f} s")
                return answer
            link.waits(pause)
            self._look()
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._future = link.start(self._method, self._request)

    def forget(self) -> None:
        self._future.cancel()  # nothing, if it is answered
        self._link.ended(self._future)

    def _answer(self, patience: float | None) -> Any:
        """Of the present attempt. Raises: RingBroken, ServerAway, grpc.RpcError."""
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
        """
        Args:
            why: what the last attempt failed with; empty: it has no answer yet.
        """
        if self._link.now - self._asked_at >= LOOK_SECONDS:
            self._link.is_waiting(self, self._method, self._asked_at, why)
        waited = self._link.now - self._began_at
        if not self._told and waited >= TOLD_SECONDS:
            self._told = True
            why = self._link.trouble() or why or "it does not answer"
            log.warning(f"{self._link.name} is pending for {waited:.0f} s ({self._method}): {why}")


class WritePart:
    """A part of a checkpoint that the server writes."""

    def __init__(self, link: ServerLink, call: Any):
        self._link, self._call = link, call

    def taken(self) -> None:
        self._call.initial_metadata()  # comes, or the call fails: keepalive sees to that, or a cut
        self._link.ended(self._call)
        if self._call.done() and self._call.code() is not grpc.StatusCode.OK:
            self.written()

    def written(self) -> pb.Written:
        try:
            answers = [*self._call]
        except grpc.RpcError:
            code = self._call.code()
            what = PartNotWritten if code in AWAY else CheckpointError
            why = f"{code.name}: {self._call.details()}"
            raise what(f"{self._link.name} has not written its part: {why}") from None
        if len(answers) != 1 or answers[0].why:
            why = answers[0].why if answers else "no answer"
            raise CheckpointError(f"{self._link.name} has not written its part: {why}")
        return answers[0]

    def forget(self) -> None:
        self._call.cancel()  # nothing, if it is answered
        self._link.ended(self._call)
