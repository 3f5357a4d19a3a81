# SPDX-License-Identifier: Apache-2.0
"""The master of a release of the chart, over all its runs (`--backend kubernetes`).

A run begins with the values in the chart's object. It survives its masters: the status ConfigMap has the
run's id, the values that it began with, and the number of workers so far; the workers hold the trained state.
A run keeps its values, also after its end. Live values can change while it trains; a change of any other
value is refused and has no effect. Only a changed `runId` in the values starts a new run.

    found, wanted ──▶ plan ──▶ Train     start or continue a run, with a master's loop of its own
                               Refuse    the values are invalid, or the run needs a different version of edl
                               Rest      the run has ended
    ... until a new run is requested; then the release is read again, and so on

When a run has ended, its master stays, so that the Deployment does not start it again. A master stands by
before it acts, and after it was superseded (`candidate`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import structlog

import edl
from edl.contract import vital
from edl.contract.ids import RunId, WorkerId
from edl.contract.modes import MAX_SERVERS
from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.contract.tokens import Tokens
from edl.errors import EdlError
from edl.kubernetes.client import SOON, Api
from edl.kubernetes.pods import Pod
from edl.kubernetes.timing import Timing
from edl.log import log_at
from edl.master.backends.base import Tasks
from edl.master.backends.kubernetes import (
    EndedRun,
    Found,
    Installed,
    Kubernetes,
    Place,
    ServerSet,
    until_answered,
)
from edl.master.cluster.candidate import Candidate
from edl.master.cluster.kept_tokens import keep_tokens
from edl.master.core import events as ev
from edl.master.core import facts, past
from edl.master.http.metrics import Metrics
from edl.master.http.server import HttpServer
from edl.master.loop import Master
from edl.master.parameter_servers.base import NoServers, ParameterServers
from edl.master.parameter_servers.base import end as end_servers
from edl.master.parameter_servers.deferred import DeferredServers
from edl.master.parameter_servers.remote import RemoteServers
from edl.master.rpc.resting import RestingServer
from edl.master.rpc.standby import vouches
from edl.master.rpc.storage import Storage
from edl.master.service import serve, token_for
from edl.master.spec import Invalid, JobSpec, Wanted
from edl.net.listener import Listener
from edl.net.tls import certificate_for

log = structlog.get_logger()

# For workers to connect to a master that takes over and that has heard of them while it stood by. Longer than
# a heartbeat timeout may be: the streams of all of them are opened at once.
PROMPT_SECONDS = 3.0
STORES = "EDL_STORES"  # set by the chart if the output directory is on a volume that outlives the pod

NO_SERVERS = (
    "the release has none, as nothing in its values says that the model has edl.layers.Embedding; install "
    "it, or start another run, with mode=hybrid (mode=train keeps the rows in the ring)"
)

NOTHING = facts.Past({}, "starting")  # the history of a new run


@dataclass(frozen=True)
class Train:
    """Start a run, or continue one.

    Args:
        why: why a new run follows an earlier one; empty for the first run, and for one that continues.
    """

    run_id: RunId
    spec: JobSpec
    adopted: ev.Adopted
    why: str = ""


@dataclass(frozen=True)
class Refuse:
    """No run can start.

    Args:
        run_lives: an existing run continues without this master.
    """

    why: str
    run_lives: bool = False


@dataclass(frozen=True)
class Rest:
    """The run has ended, and no new run is requested."""


Plan: TypeAlias = Train | Refuse | Rest


def plan(found: Found, wanted: Wanted, new_id: RunId) -> Plan:
    """Decide what to do with a release.

    Args:
        new_id: the id of a new run, if one starts.
    """
    if found.foreign(edl.__version__):
        if found.holds_state:
            return Refuse(_another_version(found), run_lives=True)
        found = replace(found, run_id=None, earlier=None)
    if found.run_id is None or found.another_requested(wanted):
        if isinstance(wanted, Invalid):
            return Refuse(wanted.why)
        why = _another_run(found, wanted, new_id) if found.run_id is not None else ""
        return Train(new_id, wanted, ev.Adopted((), found.next_id, past=NOTHING), why)
    if found.ended:
        return Rest()
    if found.earlier is not None:
        spec, _ = found.earlier.with_live_values(wanted)
    elif isinstance(wanted, Invalid):  # the values of the run are unknown
        return Refuse(wanted.why)
    else:
        spec = wanted
    return Train(found.run_id, spec, ev.Adopted(found.workers, found.next_id))


def _another_run(found: Found, wanted: JobSpec, new_id: RunId) -> str:
    """Describe why a new run begins; `helm rollback` may have changed runId without its user knowing."""
    of = found.requested
    state = f"has ended: {found.ended}" if found.ended else "ends, and keeps only what is in checkpoints"
    return (
        f"run {new_id} begins, because runId is {wanted.config.run_id!r} now; it was {of!r} for run "
        f"{found.run_id}, which {state}"
    )


def _another_version(found: Found) -> str:
    return (
        f"run {found.run_id} is of edl {found.version}, and this master of edl {edl.__version__} cannot take "
        "its workers over: they train for at most elastic.masterOutageTimeoutSeconds without a master. To go "
        f"on, install edl {found.version} again (helm rollback); for another run, delete its workers' pods"
    )


class TrainingRun:
    """A run with its master, as the backend sees it. `another` is set when a new run is requested."""

    def __init__(self, master: Master):
        self._master, self.run_id = master, master.run_id
        self.emit, self.status, self.summary = master.emit, master.status, master.summary
        self.past = master.past
        self.another = asyncio.Event()

    @property
    def spec(self) -> JobSpec:
        """The values that the run was started with, and the live values and the mode that it took since."""
        return self._master.spec

    def take(self, wanted: Wanted) -> None:
        """Process changed values of the release."""
        if isinstance(wanted, JobSpec) and (name := wanted.config.run_id) != self.spec.config.run_id:
            log.info(f"runId is {name!r} now: this run ends, and a new run begins")
            self.another.set()
        else:
            self._master.take(wanted)


class ReleaseMaster:
    """One release's master, over all its runs.

    Args:
        output: directory for journals.
        listen: host:port for workers.
        metrics: host:port of health and metrics.
    """

    def __init__(self, output: Path, listen: str, metrics: str):
        self._output, self._listen, self._metrics_address = output, listen, metrics
        self._place = Place.from_environment()
        self._api = Api(Timing.from_environment())
        self._candidate = Candidate(
            self._api, self._place, self._ask, self._listener, listen, self._prepare, self._act
        )
        self._master: Master | None = None
        self._installed: Installed | None = None
        self._metrics = Metrics(self._status, self._numbers)
        self._http = HttpServer(self._ready, {"/metrics": self._metrics.page})

    def leave(self) -> None:
        """End this process; the run continues."""
        self._candidate.leave()

    async def run(self) -> None:
        """Stand by, act, and stand by again once superseded, until `leave`.

        Raises:
            ConfigError: the release's objects are invalid, or the account lacks a right.
        """
        await self._http.start(self._metrics_address)
        try:
            await self._candidate.run()
        finally:
            await self._api.close()
            await self._http.close()

    async def _prepare(self) -> None:
        """Read the release before standing by, so that invalid objects are reported early."""
        self._installed = None
        (await Installed.open(self._place, self._api)).wanted()

    async def _act(self) -> None:
        """Read the release, and execute the plan for it."""
        candidate = self._candidate
        installed = await candidate.unless_leaving(Installed.open(self._place, self._api))
        if installed is not None and not candidate.election.lost.is_set():
            self._installed = installed
            keeping = vital.task(keep_tokens(self._api, self._place, self._tokens), "token")
            try:
                await self._next(installed)
            finally:
                keeping.cancel()

    def _listener(self) -> Listener:
        """Create a listener that logs warnings about its certificate itself."""
        tokens = Tokens.of_environment(token_for(self._output), log.warning)
        return Listener(tokens, certificate_for(self._host, log.warning))

    @property
    def _host(self) -> str:
        """The host name of the masters' address, for which their certificates are valid."""
        return self._place.address.rpartition(":")[0]

    async def _ask(self, address: str, term: int) -> bool:
        """Ask a standby whether it vouches for the master of that term."""
        token = Tokens.of_environment(token_for(self._output), log.warning).current
        return await vouches(address, self._host, token, term, self._api.pace.renew)

    async def _next(self, installed: Installed) -> None:
        """Execute the plan for the release, until a different plan is due."""
        found, wanted = installed.found, installed.wanted()
        match plan(found, wanted, RunId(secrets.token_hex(8))):
            case Rest():
                log.info(f"run {found.run_id} has ended: {found.ended}; waiting for another runId")
                await self._rest(installed)
            case Refuse(why, run_lives):
                log.error(why)
                phase = installed.left.phase if run_lives else found.ended or Phase.Failed
                await self._refuse(installed, phase, why)
            case Train() as next_run:
                log_at(next_run.spec.config.log_level)
                log.info(
                    f"run {next_run.run_id}: {'taken over' if found.run_id == next_run.run_id else 'begins'}"
                )
                if next_run.why:
                    log.warning(next_run.why)
                    installed.notices.append((Reason.RunStarted, next_run.why))
                await self._train(installed, next_run, wanted)

    async def _train(self, installed: Installed, todo: Train, wanted: Wanted) -> None:
        # Workers that reached this master while it stood by connect at once; others must find it first.
        adopted = replace(
            todo.adopted,
            prompt=tuple(WorkerId(worker) for worker in sorted(self._candidate.take_witnesses())),
            prompt_seconds=PROMPT_SECONDS,
        )
        if installed.left.run_id == todo.run_id and (began := installed.left.started_at):
            since = max(0.0, time.time() - began)
            left = installed.left
            known = left.past and past.until(left.past, left.written_at - began)
            adopted = replace(adopted, active_seconds=since, began_with=left.began_with, past=known)
        master = Master(todo.spec, todo.run_id, adopted=adopted)
        run = TrainingRun(master)
        backend = Kubernetes(installed, run)
        master.observers = [self._metrics.observe, backend.observe]
        if todo.spec.with_live_values(wanted)[1]:
            run.take(wanted)  # reports refused changes as if they were made now
        self._master = master
        over = asyncio.create_task(self._candidate.until(run.another))
        over.add_done_callback(lambda _: master.abandon())
        of_chart = ServerSet(self._api, self._place, master.emit)
        try:
            token = token_for(self._output)
            await serve(
                master,
                self._output,
                self._listen,
                token,
                lambda _: backend,
                reached_at=self._host,
                authority=self._candidate.election,
                servers=self._servers(installed, master, wanted, of_chart),
                storage=await self._storage(todo),
            )
        finally:
            over.cancel()
            self._master = None
            await of_chart.close()

    async def _storage(self, todo: Train) -> Storage | None:
        """The files of this run, if the chart has given the master's pod a volume for them."""
        if not os.environ.get(STORES):
            return None
        storage = Storage(self._output, todo.run_id)
        if todo.spec.config.trains:
            await asyncio.to_thread(storage.begin, todo.spec.config.checkpoint.resume)
        return storage

    def _servers(
        self, installed: Installed, master: Master, wanted: Wanted, of_chart: ServerSet
    ) -> ParameterServers:
        """The parameter servers of the chart's StatefulSet."""
        left_open = isinstance(wanted, JobSpec) and not wanted.config.is_decided
        another_run = installed.left.run_id not in ("", master.run_id)

        def make() -> ParameterServers:
            if not (count := master.spec.config.servers):
                if left_open and another_run and self._place.server_address:  # the earlier may have had some
                    of_chart.keep_between(0, 0)
                return NoServers()
            if not self._place.server_address:
                master.emit(ev.ServerExited(0, NO_SERVERS, fatal=True))
                return NoServers()
            config, address = master.spec.config, self._place.server_address.format
            listen_timeout = config.elastic.startup_timeout_seconds
            if not config.trains:  # rows do not move: the chart sets the number, and the Role cannot scale
                return RemoteServers(master.emit, self._token, address, count, listen_timeout=listen_timeout)
            # The chart may have started no servers. If there are more than `count`, a ring may use them.
            of_chart.keep_between(count, MAX_SERVERS)
            return RemoteServers(
                master.emit,
                self._token,
                address,
                count,
                of_chart.scale,
                listen_timeout,
                lambda: of_chart.running,
            )

        return make() if master.spec.config.is_decided else DeferredServers(master.emit, make)

    def _addresses(self, servers: int) -> list[str]:
        return [self._place.server_address.format(index) for index in range(servers)]

    @cached_property
    def _tokens(self) -> Tokens:
        return Tokens.of_environment(token_for(self._output), lambda _: None)

    def _token(self) -> str:
        return self._tokens.current

    def _end_servers(
        self, installed: Installed
    ) -> tuple[int, Callable[[], Coroutine[Any, Any, None]]] | None:
        """Return the number of an ended run's servers, and a function that makes them drop its rows."""
        found, wanted = installed.found, installed.wanted()
        if found.earlier is None or found.run_id is None or not self._place.server_address:
            return None
        if not found.earlier.config.servers:
            return None
        now, _ = found.earlier.with_live_values(wanted)  # their number may have changed while the run trained
        count = now.config.servers or found.earlier.config.servers
        return count, partial(end_servers, self._addresses(count), self._token, found.run_id)

    async def _rest(self, installed: Installed) -> None:
        ended = EndedRun(installed, self._end_servers(installed))
        await ended.start()
        try:
            async with self._resting(installed, installed.status.get("phase", "")):
                await self._candidate.until(ended.changed)
        finally:
            await ended.close()

    @asynccontextmanager
    async def _resting(self, installed: Installed, phase: str, why: str = "") -> AsyncIterator[None]:
        """Answer calls during this context with how the run has ended, or why none can start."""
        async with AsyncExitStack() as until_then:
            try:
                why = why or installed.status.get("reason", "")
                server = RestingServer(self._listener(), phase, why)
                await server.start(self._listen)
                until_then.push_async_callback(server.close)
            except EdlError as error:
                log.warning(f"calls are not answered until another run begins: {error}")
            yield

    async def _refuse(self, installed: Installed, phase: str, why: str) -> None:
        """Report why no run can start, until the chart's object changes or the last run's workers end."""
        changed, tasks = asyncio.Event(), Tasks()
        held = installed.found.holds_state

        def pods_changed(_pod: Pod, _gone: bool) -> None:
            if held and not installed.found.holds_state:
                changed.set()

        installed.on_job.append(changed.set)
        installed.on_pod.append(pods_changed)
        for part, work in {
            "watching the release": installed.job.run,
            "watching pods": installed.pods.run,
        }.items():
            tasks.keep(part, work, lambda _: None, self._api.pace.status)
        path = self._place.path("configmaps", self._place.names.status)
        said = {"data": {"phase": phase, "reason": why}}
        try:
            await until_answered(self._api.pace, lambda: self._api.patch(path, said, SOON))
            if held:  # do not answer workers with a run's state, which look for a master of that run
                await self._candidate.until(changed)
            else:
                async with self._resting(installed, phase, why):
                    await self._candidate.until(changed)
        finally:
            await tasks.close()

    # --- for the metrics

    def _ready(self) -> bool:
        """True if this master stands by, or acts and has read the release.

        A later outage of the API changes nothing, because workers must find their master.
        """
        candidate, election = self._candidate, self._candidate.election
        acts = bool(election.term) and not election.lost.is_set()
        return candidate.stands_by or (self._installed is not None and acts)

    def _status(self) -> dict[str, Any]:
        return self._master.status(asyncio.get_running_loop().time()) if self._master is not None else {}

    def _numbers(self) -> dict[str, Any]:
        return self._installed.numbers() if self._installed is not None else {}
