# SPDX-License-Identifier: Apache-2.0
"""Parameter servers in the core: resharding while the job trains, and the decision of mode=auto.

With mode=auto, the first worker that has built the model reports its number of tables. That decides once, for
all workers, whether the job has servers. The root of a ring moves the rows while the ring is formed, between
two steps (trainer/ps_client/client.py). The core knows the requested servers, and those that hold the rows
according to the ring.

The ring waits for a server that does not answer, unless others hold its rows. `waits` describes that for the
status, in all modes.
"""

from __future__ import annotations

from edl.contract import modes
from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.ring import BREAK, CHANGE
from edl.master.core.state import Away, State
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
        job.mode, job.servers.awaited = mode, servers > 0
        if job.servers.awaited:
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
    before = known.wanted
    known.wanted, known.addresses, known.stay, known.assigned = event.servers, event.addresses, "", 0
    forming = job.ring.running and not job.ring.up
    if known.awaited:  # the first servers: a ring of an earlier master, if any, knows them
        known.awaited = False
    elif forming and not before:  # the ring forms with the servers its members know, and some may have ended
        known.due = ""
        job.close(_change(known.have, event.servers), BREAK)
    elif known.have == event.servers and not forming and not _may_move(job):
        # A different number was requested in between.
        known.due = ""
        _assigned(job, event.servers, event.servers)
    else:
        known.due = _change(known.have, event.servers)


def _may_move(job: State) -> bool:
    """True if the ring may still move the rows, or the last one may have done so before it broke.

    Members report where the rows are when they have the state. With mode=ps rows move later, at a boundary.
    """
    return job.servers.ordered not in (0, job.servers.have)


def listens(job: State, event: ev.ServerListens) -> None:
    """Report that a server can be called."""
    again = " again" if event.again else ""
    said = f"parameter server {event.server} listens{again} after {event.seconds:.1f} s"
    job.notice(Reason.ServerReady, said)
    answers(job, event)


def answers(job: State, event: ev.ServerListens | ev.ServerRecovered) -> None:
    """Record that a server answers again. If it was out, the next ring brings its rows to it."""
    server = event.server
    job.servers.answered[server] = job.now
    job.servers.unanswered.pop(server, None)
    job.servers.away.pop(server, None)
    if server in job.servers.out:
        job.servers.due = f"parameter server {server} is back"


def have_rows(job: State, event: ev.JoinedRing) -> None:
    """Record which servers hold the rows; all members of a ring report the same."""
    known = job.servers
    if event.out != known.out:
        if out := [str(server) for server in event.out if server not in known.out]:
            job.notice(
                Reason.ServerRemoved,
                f"the ring goes on without parameter server {', '.join(out)}: others have the same rows",
            )
        elif known.out:
            job.notice(Reason.Resharded, "all parameter servers have their rows again")
        known.out = event.out
    formed = job.ring.changes[-1].formed_at
    for server in event.out:
        if known.answered.get(server, 0.0) >= formed:
            known.due = f"parameter server {server} is back"
    before, known.have = known.have, event.servers
    if event.stay or not job.config.asynchronous:
        known.ordered = event.servers
    if event.stay and known.wanted != event.servers:
        _stay(job, known.wanted, event.servers, event.stay)
    elif known.wanted == event.servers != known.assigned and not _may_move(job):
        if before and before != event.servers:
            job.notice(Reason.Resharded, f"the rows are on {_servers(event.servers)}, {before} before")
        _assigned(job, event.servers, event.servers)


def given_up(job: State, event: ev.ServersGivenUp) -> None:
    """Handle requested servers that have not listened in time; no rows have been moved."""
    _stay(job, event.servers, event.stay, event.why)


def _stay(job: State, wanted: int, servers: int, why: str) -> None:
    known = job.servers
    known.stay = f"the rows stay on {_servers(servers)}, not {wanted}: {why}"
    job.notice(Reason.ReshardFailed, known.stay)
    known.wanted, known.due = servers, ""
    _assigned(job, servers, wanted)


def _assigned(job: State, servers: int, wanted: int) -> None:
    """Release all servers that do not hold the rows."""
    known = job.servers
    known.assigned, known.addresses = servers, known.addresses[:servers]
    known.away = {index: one for index, one in known.away.items() if index < servers}
    known.waited = tuple(index for index in known.waited if index < servers)
    job.do(ef.Assigned(servers, wanted))


def exited(job: State, event: ev.ServerExited) -> None:
    """Handle the exit of a server: its rows are in its log and in checkpoints, and workers wait."""
    job.servers.unanswered.pop(event.server, None)
    how = f"parameter server {event.server} exited: {event.why}"
    if event.fatal:
        job.end(Phase.Failed, how)
        return
    when = f" in {event.pause_seconds:.0f} s" if event.pause_seconds else ""
    job.notice(Reason.ServerExited, f"{how}; it is restarted{when}")


# --- awaited servers


def away(job: State, event: ev.ServerAway) -> None:
    """Note that a parameter server is unreachable, and since when."""
    job.servers.away[event.server] = Away(job.now - event.seconds, event.what)


def unanswered(job: State, event: ev.ProbeUnanswered) -> None:
    """Restart a server whose process hangs; restart it once more if it still hangs after as long again."""
    known, server = job.servers, event.server
    if event.probes == 1 or server not in known.unanswered:
        known.unanswered[server] = job.now
        return
    seconds = job.now - known.unanswered[server]
    if event.probes < HANG_PROBES or seconds < hang_seconds(job, server) or job.ending is not None:
        return
    known.unanswered[server] = job.now
    said = f"parameter server {server} has answered nothing for {seconds:.0f} s: its process is restarted"
    job.notice(Reason.ServerRestarted, said)
    job.do(ef.RestartServer(server))


def hang_seconds(job: State, server: int) -> float:
    """Return for how many seconds a server's process may answer no Probe before it is restarted."""
    copied = job.config.ps.replicas > 1 and not {*job.servers.out} - {server}
    return HANG_SECONDS if job.config.ps.log or copied else LAST_COPY_SECONDS


def tell(job: State) -> None:
    """Notify users when the ring starts or stops waiting for servers."""
    known, waited = job.servers, tuple(_waited(job))
    if waited:
        if {*waited} - {*known.waited}:
            job.notice(Reason.ServerUnavailable, waits(job, job.now))
        if not known.waited:
            known.waited_at = min(known.away[index].since for index in waited)
        known.waited = waited
    elif known.waited and all(index in known.out for index in known.waited):
        known.waited = ()
    elif known.waited and not any(index in known.away for index in known.waited):
        seconds = job.now - known.waited_at
        job.notice(
            Reason.ServerRecovered, f"{_names(known.waited)} can be called again, after {seconds:.1f} s"
        )
        known.waited = ()


def waits(job: State, now: float) -> str:
    """Describe for which servers the ring waits, how long, and what to do; empty if it does not wait."""
    found = [(index, job.servers.away[index]) for index in _waited(job)]
    if not found:
        return ""
    said = ", ".join(f"{index} ({one.what} for {max(0.0, now - one.since):.1f} s)" for index, one in found)
    logs = " and ".join(f"edl logs ps-{index}" for index, _ in found)
    todo = f"it goes on by itself as soon as that answers; if this lasts, see {logs}"
    if any(one.what == HANGS for _, one in found):
        hang = max(hang_seconds(job, index) for index, one in found if one.what == HANGS)
        todo += f". A process that answers nothing for {hang:.0f} s is restarted"
    return f"the ring waits for parameter server{'s' if len(found) > 1 else ''} {said}: {todo}"


def waited_since(job: State, since: float) -> bool:
    """True if the ring may have waited for a server after `since`."""
    return bool(_waited(job)) or any(at >= since for at in job.servers.answered.values())


def _waited(job: State) -> list[int]:
    known = job.servers
    if not job.ring.members or job.ending is not None:
        return []
    needed = known.have if job.ring.up else max(known.have, known.wanted)  # 0: not reported yet
    return [i for i in sorted(known.away) if i not in known.out and (not needed or i < needed)]


def _names(servers: tuple[int, ...]) -> str:
    return f"parameter server{'s' if len(servers) > 1 else ''} {', '.join(map(str, servers))}"


def regroup(job: State) -> None:
    """Order a running ring to leave at a step boundary when its servers must change."""
    if job.servers.due and job.ring.running and job.ring.up:
        why, job.servers.due = job.servers.due, ""
        job.close(why, CHANGE)


def _change(have: int, wanted: int) -> str:
    return f"parameter servers {f'{have} -> ' if have not in (0, wanted) else ''}{wanted}"


def _servers(count: int) -> str:
    return f"{count} parameter server{'s' if count != 1 else ''}"
