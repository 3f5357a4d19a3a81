# SPDX-License-Identifier: Apache-2.0
"""Parameter servers in the core: resharding while the job trains, and the decision of mode=auto.

With mode=auto, the first worker that has built the model reports its number of tables. That decides once, for
all workers, whether the job has servers. The root of a ring moves the rows while the ring is formed, between
two steps (trainer/ps_client/root.py). The core knows the requested servers, and those that hold the rows
according to the ring.

The ring waits for a server that does not answer, unless others hold its rows. `waits` describes that for the
status, in all modes.
"""

from __future__ import annotations

from collections.abc import Collection

from edl.contract import modes
from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.ring import BREAK, CHANGE
from edl.master.core.servers import DUE, MOVING, SETTLED, Servers
from edl.master.core.state import State
from edl.master.core.workers import WorkerRecord

HANGS = "not answering"  # although its process runs, as far as is known
# A process that has answered no Probe for so long hangs, and is restarted. A busy server answers Probes. What
# stops a process for a moment (a slow disk, a machine that swaps) rarely lasts for longer than some seconds.
HANG_SECONDS = 30.0
HANG_PROBES = 5  # in a row: after a stall of the master, only the Probe under way has no answer
# The same for a process whose memory alone holds rows: restarting it costs all training since the newest
# checkpoint, so that is done only when the process will hardly go on.
LAST_COPY_SECONDS = 600.0


def decide(job: State, w: WorkerRecord, tables: int) -> str:
    """Decide the mode (mode=auto) from the number of tables in a worker's model.

    Returns why the worker cannot be in this job; empty if it can.
    """
    if job.config.is_decided:
        return ""  # the worker knows the mode, and itself refuses a model that does not fit
    mode = modes.decided(job.config.mode, tables)
    if job.mode == modes.AUTO:
        servers = modes.servers_of(mode, job.config.ps.servers)
        job.mode = mode
        if servers:
            job.servers.step("decide")
            job.notice(
                Reason.ModeDecided,
                f"the model has {tables} edl.layers.Embedding: {'its' if tables == 1 else 'their'} rows are "
                f"on {_servers(servers)} (mode=hybrid; to keep them in the ring: mode=train)",
            )
        job.do(ef.ModeDecided(mode))
    if mode == job.mode:
        return ""
    found, others = (str(tables), "none") if tables else ("no", "some")
    return (
        f"worker {w.id} found {found} edl.layers.Embedding in the model, and the workers before it found "
        f"{others} (mode={job.mode}): model() must return the same in each process"
    )


def ready(job: State, event: ev.ServersReady) -> None:
    """Handle that the requested servers listen: move the rows to them."""
    known = job.servers
    forms_as_known = not known.wanted and job.ring.running and not job.ring.up
    known.request(event.servers, event.addresses)
    if known.state is SETTLED:  # a different number was requested in between
        job.do(ef.Assigned(event.servers, event.servers))
    elif known.state is DUE and forms_as_known:  # its members may wait for a server that has ended
        job.close(_change(known), BREAK)


def listens(job: State, event: ev.ServerListens) -> None:
    """Report that a server can be called."""
    again = " again" if event.again else ""
    said = f"parameter server {event.server} listens{again} after {event.seconds:.1f} s"
    job.notice(Reason.ServerReady, said)
    answers(job, event)


def answers(job: State, event: ev.ServerListens | ev.ServerRecovered) -> None:
    """Record that a server answers again. If it was out, the next ring brings its rows to it."""
    job.servers[event.server].recover(job.now)


def have_rows(job: State, event: ev.JoinedRing) -> None:
    """Record which servers hold the rows; all members of a ring report the same."""
    known = job.servers
    had, were_out = known.have, known.out
    known.hold(event.servers, event.out)
    if out := {*event.out} - {*were_out}:
        without = f"the ring goes on without {_names(out)}: others have the same rows"
        job.notice(Reason.ServerRemoved, without)
    elif were_out and not event.out:
        job.notice(Reason.Resharded, "all parameter servers have their rows again")
    if event.stay and known.wanted not in (0, event.servers):
        _stay(job, event.servers, known.wanted, event.stay)
    elif known.state is MOVING and known.wanted == event.servers:
        if had not in (0, event.servers):
            job.notice(Reason.Resharded, f"the rows are on {_servers(event.servers)}, {had} before")
        known.settle(event.servers)
        job.do(ef.Assigned(event.servers, event.servers))


def given_up(job: State, event: ev.ServersGivenUp) -> None:
    """Handle requested servers that have not listened in time; no rows have been moved to them."""
    known = job.servers
    if known.state is SETTLED and event.stay:
        _stay(job, event.stay, event.servers, event.why)
        return
    job.notice(Reason.ReshardFailed, f"{_servers(event.servers)} cannot have the rows: {event.why}")
    if needed := max(event.stay, len(known.addresses)):  # any of these may have rows, or is to have them
        job.do(ef.Assigned(needed, event.servers))


def _stay(job: State, servers: int, wanted: int, why: str) -> None:
    known = job.servers
    known.settle(servers, f"the rows stay on {_servers(servers)}, not {wanted}: {why}")
    job.notice(Reason.ReshardFailed, known.stay)
    job.do(ef.Assigned(servers, wanted))


def exited(job: State, event: ev.ServerExited) -> None:
    """Handle the exit of a server: its rows are in its log and in checkpoints, and workers wait."""
    job.servers[event.server].hang(None)
    how = f"parameter server {event.server} exited: {event.why}"
    if event.fatal:
        job.end(Phase.Failed, how)
        return
    when = f" in {event.pause_seconds:.0f} s" if event.pause_seconds else ""
    job.notice(Reason.ServerExited, f"{how}; it is restarted{when}")


# --- awaited servers


def away(job: State, event: ev.ServerAway) -> None:
    """Note that a parameter server is unreachable, and since when."""
    job.servers[event.server].leave(event.what, job.now - event.seconds)


def unanswered(job: State, event: ev.ProbeUnanswered) -> None:
    """Restart a server whose process hangs; restart it once more if it still hangs after as long again."""
    server = job.servers[event.server]
    if event.probes == 1 or server.silent_since is None:
        server.hang(job.now)
        return
    seconds = job.now - server.silent_since
    if event.probes < HANG_PROBES or seconds < hang_seconds(job, event.server) or job.ending is not None:
        return
    server.hang(job.now)
    said = f"{_names([event.server])} has answered nothing for {seconds:.0f} s: its process is restarted"
    job.notice(Reason.ServerRestarted, said)
    job.do(ef.RestartServer(event.server))


def hang_seconds(job: State, server: int) -> float:
    """Return for how many seconds a server's process may answer no Probe before it is restarted."""
    copied = job.config.ps.replicas > 1 and not {*job.servers.out} - {server}
    return HANG_SECONDS if job.config.ps.log or copied else LAST_COPY_SECONDS


def tell(job: State) -> None:
    """Notify users when the ring starts or stops waiting for servers."""
    known, before, waited = job.servers, job.servers.waited, tuple(_waited(job))
    if {*waited} - {*before}:
        job.notice(Reason.ServerUnavailable, waits(job, job.now))
    if before and not waited and not {*before} <= {*known.out}:
        if any(known[index].away for index in before):
            return  # the ring does not wait, for the moment
        seconds = job.now - known.waited_since
        said = f"{_names(before)} can be called again, after {seconds:.1f} s"
        job.notice(Reason.ServerRecovered, said)
    if waited != before:
        known.wait(waited)


def waits(job: State, now: float) -> str:
    """Describe for which servers the ring waits, how long, and what to do; empty if it does not wait."""
    found = {index: job.servers[index] for index in _waited(job)}
    if not found:
        return ""
    said = ", ".join(
        f"{index} ({one.away} for {max(0.0, now - one.away_since):.1f} s)" for index, one in found.items()
    )
    logs = " and ".join(f"edl logs ps-{index}" for index in found)
    todo = f"it goes on by itself as soon as that answers; if this lasts, see {logs}"
    if hangs := [hang_seconds(job, index) for index, one in found.items() if one.away == HANGS]:
        todo += f". A process that answers nothing for {max(hangs):.0f} s is restarted"
    return f"the ring waits for parameter server{'s' if len(found) > 1 else ''} {said}: {todo}"


def waited_since(job: State, since: float) -> bool:
    """True if the ring may have waited for a server after `since`."""
    return bool(_waited(job)) or any(one.answered_at >= since for one in job.servers.known.values())


def _waited(job: State) -> list[int]:
    known = job.servers
    if not job.ring.members or job.ending is not None:
        return []
    needed = known.have if job.ring.up else max(known.have, known.wanted)  # 0: not reported yet
    away = sorted(index for index, one in known.known.items() if one.away and not one.out)
    return [index for index in away if not needed or index < needed]


def regroup(job: State) -> None:
    """Order a running ring to leave at a step boundary when its servers must change."""
    known, ring = job.servers, job.ring
    if not (known.state is DUE or known.out) or not (ring.running and ring.up):
        return
    back = [index for index in known.out if known[index].answered_at >= ring.changes[-1].formed_at]
    if known.state is DUE or back:
        job.close(_change(known) if known.state is DUE else f"{_names(back)} is back", CHANGE)


def _change(known: Servers) -> str:
    before = f"{known.have} -> " if known.have not in (0, known.wanted) else ""
    return f"parameter servers {before}{known.wanted}"


def _servers(count: int) -> str:
    return f"{count} parameter server{'s' if count != 1 else ''}"


def _names(servers: Collection[int]) -> str:
    return f"parameter server{'s' if len(servers) > 1 else ''} {', '.join(map(str, sorted(servers)))}"
