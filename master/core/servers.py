"""Parameter servers that come and go while the job trains: when the ring is formed anew for them. And whether
there are any, where that depends on the model (mode=auto).

The first worker that has built the model says how many tables it has, and that decides: once, for all
workers. The rows are moved while a ring is formed, between two steps, by its root (trainer/servers.py). What
is known here is which servers are to have them, and what the ring has said who has.
"""

from __future__ import annotations

from edl.contract import modes
from edl.contract.reasons import Reason
from master.core import events as ev
from master.core.state import State
from master.core.workers import WorkerRecord


def decide(job: State, w: WorkerRecord, tables: int) -> str:
    """The worker has built the model, which has so many tables. Returns why it cannot be in this job; empty:
    it can."""
    if job.config.is_decided:
        return ""  # it was told, and has refused a model that does not fit
    mode = modes.decided(job.config.mode, tables)
    if job.mode == modes.AUTO:
        job.mode, job.servers.awaited = mode, modes.has_servers(mode)
        if job.servers.awaited:
            job.notice(
                Reason.ModeDecided,
                f"the model has {tables} edl.layers.Embedding: {'its' if tables == 1 else 'their'} rows are "
                f"on {_servers(job.config.ps.servers)} (mode=hybrid; to keep them in the ring: mode=train)",
            )
        job.do(ev.ModeDecided(mode))
    if mode == job.mode:
        return ""
    found, others = (str(tables), "none") if tables else ("no", "some")
    return (
        f"worker {w.id} found {found} edl.layers.Embedding in the model, and the workers before it found "
        f"{others} (mode={job.mode}): model() must return the same in each process"
    )


def ready(job: State, event: ev.ServersReady) -> None:
    """So many servers are to have the rows, and listen."""
    known = job.servers
    known.wanted, known.addresses = event.servers, event.addresses
    if known.awaited:  # the first ones: what there is of a ring, of an earlier master, knows them
        known.awaited = False
    elif known.have == event.servers:  # another number was wanted in between
        known.due = ""
        job.do(ev.Arranged(event.servers))
    else:
        were = f"{known.have} -> " if known.have else ""
        known.due = f"parameter servers {were}{event.servers}"


def answers(job: State, server: int) -> None:
    """It is back. The rows of one that was done without are brought to it."""
    job.servers.answered[server] = job.now
    if server in job.servers.out:
        job.servers.due = f"parameter server {server} is back"


def have_rows(job: State, event: ev.JoinedRing) -> None:
    """What all members of the ring say alike."""
    known = job.servers
    if event.out != known.out:
        if out := [str(server) for server in event.out if server not in known.out]:
            job.notice(
                Reason.ServerOut,
                f"the ring goes on without parameter server {', '.join(out)}: others have the same rows",
            )
        elif known.out:
            job.notice(Reason.ServersMoved, "all parameter servers have their rows again")
        known.out = event.out
    formed = job.ring.changes[-1].formed_at
    for server in event.out:
        if known.answered.get(server, 0.0) >= formed:
            known.due = f"parameter server {server} is back"
    before, known.have = known.have, event.servers
    if event.stay and known.wanted != event.servers:
        job.notice(
            Reason.ServersStay,
            f"the rows stay on {_servers(event.servers)}, not {known.wanted}: {event.stay}",
        )
        known.wanted, known.due = event.servers, ""
        job.do(ev.Arranged(event.servers))
    elif known.wanted == event.servers != before:
        if before:
            job.notice(Reason.ServersMoved, f"the rows are on {_servers(event.servers)}, {before} before")
        job.do(ev.Arranged(event.servers))


def regroup(job: State) -> None:
    """Ask a running ring to leave at a step boundary when its servers are to be others."""
    if job.servers.due and job.ring.running and job.ring.up:
        why, job.servers.due = job.servers.due, ""
        job.close(why, planned=True)


def _servers(count: int) -> str:
    return f"{count} parameter server{'s' if count != 1 else ''}"
