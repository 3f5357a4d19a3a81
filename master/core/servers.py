"""Parameter servers that come and go while the job trains: when the ring is formed anew for them.

The rows are moved while a ring is formed, between two steps, by its root (trainer/servers.py). What is known
here is which servers are to have them, and what the ring has said who has.
"""

from __future__ import annotations

from edl.contract.reasons import Reason
from master.core import events as ev
from master.core.state import State


def ready(job: State, event: ev.ServersReady) -> None:
    """So many servers are to have the rows, and listen."""
    known = job.servers
    before = known.wanted
    known.wanted, known.addresses, known.arranged = event.servers, event.addresses, 0
    forming = job.ring.running and not job.ring.up
    if forming and not before:  # for as many as its members know: it may wait for some that have ended
        known.due = ""
        job.close(_change(known.have, event.servers), planned=False)
    elif known.have == event.servers and not forming:  # another number was wanted in between
        known.due, known.arranged = "", event.servers
        job.do(ev.Arranged(event.servers))
    else:
        known.due = _change(known.have, event.servers)


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
        known.wanted, known.due, known.arranged = event.servers, "", event.servers
        job.do(ev.Arranged(event.servers))
    elif known.wanted == event.servers != known.arranged:
        known.arranged = event.servers
        if before and before != event.servers:
            job.notice(Reason.ServersMoved, f"the rows are on {_servers(event.servers)}, {before} before")
        job.do(ev.Arranged(event.servers))


def regroup(job: State) -> None:
    """Ask a running ring to leave at a step boundary when its servers are to be others."""
    if job.servers.due and job.ring.running and job.ring.up:
        why, job.servers.due = job.servers.due, ""
        job.close(why, planned=True)


def _change(have: int, wanted: int) -> str:
    return f"parameter servers {f'{have} -> ' if have else ''}{wanted}"


def _servers(count: int) -> str:
    return f"{count} parameter server{'s' if count != 1 else ''}"
