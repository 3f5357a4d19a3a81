"""One training job: everything the master knows, and the one door through which it learns.

`Job.handle(event, now)` notes what the event says, then reconciles: whatever the state now
calls for is asked for. Reconciling looks at the state only, never at which event led to it,
so an event that comes twice or late leads nowhere new.

A ring's life as the master sees it:

    formed ──every member up──▶ running ──Leave or Cut──▶ closing ──every member out──▶ formed...

The truth about progress is in the ring (the applied set travels with the weights); the
master takes it from the root at each re-forming and keeps nothing that could contradict it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edl.config import Config
from edl.ids import Generation, WorkerId
from edl.ranges import RangeSet
from edl.shares import local_batch
from master.core import events as ev
from master.core.goodput import Goodput
from master.core.leases import Leases
from master.core.ring import Limits, Ring, choose, stayers
from master.core.workers import Pool, Worker

# Ended by somebody else's will; whoever sends one of these does not blame the program.
OUTSIDE_SIGNALS = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
PAUSED = "paused"
TAKEOVER_SECONDS = 10.0  # for the workers of an earlier master to come back: they ask twice a second
FIRST_BACKOFF_SECONDS, MOST_BACKOFF_SECONDS, MOST_DOUBLINGS = 0.5, 30.0, 6


@dataclass(slots=True)
class Change:
    """One generation, for the record: who, why, and what the change cost."""

    generation: Generation
    members: tuple[WorkerId, ...]
    cause: str
    planned: bool
    formed_at: float
    from_size: int
    step: int = 0
    up_seconds: float | None = None  # from formed to every member up
    stall_seconds: float = 0.0  # the longest that a survivor waited from step to step
    redone_records: int = 0
    stepped: set[WorkerId] = field(default_factory=set)
    told: bool = False


@dataclass(slots=True)
class Failure:
    """One failure that was charged to the job."""

    worker: WorkerId
    why: str
    traceback: str


class Job:
    """The state of one job. `handle` is the only way to change it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.target, self.least, self.paused = config.workers, config.min_workers, config.paused
        self.pool = Pool()
        self.lost: dict[WorkerId, Worker] = {}  # out of the job, their exit not yet heard of
        self.leases: Leases | None = None  # unknown until a worker has counted the records
        self.generation = Generation(0)
        self.members: tuple[WorkerId, ...] = ()
        self.closing = ""  # why the ring is being left; empty while it runs
        self.planned = True  # whether it is left at a step boundary
        self.fallen = False  # whether a member of this ring has been lost
        self.waited = ""  # for what, when there was no ring
        self.regroup_at: float | None = None
        self.changes: list[Change] = []
        self.failures: list[Failure] = []
        self.early_deaths = 0  # in a row, before being ready
        self.create_at = 0.0
        self.exporter: WorkerId | None = None
        self.ending: tuple[str, str] | None = None  # phase and reason
        self.ended = False
        self.traceback = ""
        self.metrics: dict[str, float] = {}
        self.model = ""
        self.skipped = RangeSet()
        self.digests: dict[WorkerId, str] = {}
        self.step = 0
        self.loss: float | None = None
        self.restarts = 0  # how often all state was lost
        self.stale = 0  # messages that came too late to mean anything
        self.reason = "starting"
        self.takeover_at: float | None = None  # until when workers of an earlier master are waited for
        self.began_at: float | None = None
        self.ended_at: float | None = None
        self.goodput = Goodput()
        self._now = 0.0
        self._effects: list[ev.Effect] = []

    # --- the door

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Note `event` at time `now` (seconds, never going back) and say what is to be done."""
        self._excuse_the_unheard(now)
        self._now, self._effects = now, []
        match event:
            case ev.Begin():
                self.began_at = now
                self.goodput.turn("starting", now)
            case ev.Scale():
                self._say("scale", f"workers {self.target} -> {event.workers}")
                self.target = event.workers
            case ev.Live():
                self._on_live(event)
            case ev.Refused():
                self._say("refused", event.why)
            case ev.StopAsked():
                self._end("Stopped", event.why)
            case ev.Adopted():
                self._on_adopted(event)
            case ev.Tick():
                pass
            case ev.Gone():
                self._on_gone(event)
            case ev.Seen():
                self._on_seen(event)
            case ev.Delayed():
                self._on_delayed(event)
            case _:
                self._on_word(event)
        self._reconcile()
        return self._effects

    def next_deadline(self) -> float | None:
        """When time alone will call for something: a `Tick` is due then, at the latest."""
        elastic = self.config.elastic
        times: list[float] = []
        for w in self.pool:
            if w.kill_at is not None:
                times.append(w.kill_at)
            elif w.state in ("starting", "warming"):
                times.append(w.since + elastic.start_seconds)
            elif w.state != "asked":  # which may take for ever: capacity is nobody's fault
                times.append(w.heard + elastic.silence_seconds)
        waits = (self.regroup_at, self.create_at, self.takeover_at)
        times += [at for at in waits if at is not None and at > self._now]
        return min(times, default=None)

    @property
    def phase(self) -> str:
        """In one word: Starting, Training, Paused, Waiting, Finishing, or how it ended (or is ending)."""
        if self.ending is not None:
            return self.ending[0] if self.ended else "Ending"
        if self.exporter is not None:
            return "Finishing"
        if self.members:
            return "Training"
        if self.paused:
            return "Paused"
        return "Starting" if self.generation == 0 else "Waiting"

    # --- what events say

    def _excuse_the_unheard(self, now: float) -> None:
        """After a stall of our own, what the workers said meanwhile is still to be read.

        Beats come every sixth of the silence, so that nobody at all was heard for half of it
        means that we did not listen, or that everybody is silent: then a moment more costs little.
        """
        silence = self.config.elastic.silence_seconds
        if now - self._now > silence / 2:
            for w in self.pool:
                w.heard = max(w.heard, now - silence * 3 / 4)

    def _on_live(self, event: ev.Live) -> None:
        if event.workers != self.target:
            self._say("scale", f"workers {self.target} -> {event.workers}")
        if event.paused != self.paused:
            self._say("scale", "paused: the workers keep the state and wait" if event.paused else "resumed")
        self.target, self.least, self.paused = event.workers, event.min_workers, event.paused
        self.regroup_at = self._now

    def _on_adopted(self, event: ev.Adopted) -> None:
        self.pool.born = max(self.pool.born, event.born)
        for worker, handle in event.workers:
            self.pool.adopt(worker, handle, self._now)
        if event.workers:
            self.takeover_at = self._now + TAKEOVER_SECONDS
            self._say("ring", f"this master takes over from another one: {len(event.workers)} workers")

    def _on_delayed(self, event: ev.Delayed) -> None:
        w = self.pool.get(event.worker)
        if w is None or w.delay == event.why:
            return
        if event.why and not any(o.delay == event.why for o in self.pool):  # once for all that wait alike
            self._say("worker", f"worker {w.id} is waited for: {event.why}")
        w.delay = event.why

    def _on_seen(self, event: ev.Seen) -> None:
        if w := self.pool.get(event.worker):
            w.handle, w.delay = event.handle, ""
            if w.state == "asked":
                w.goes("seen")
                w.since = self._now

    def _on_gone(self, event: ev.Gone) -> None:
        w = self.pool.get(event.worker)
        if w is not None:
            how = event.why or event.signal or f"exit code {event.code}"
            self._lose(w, "ended as asked" if w.stopped else f"gone ({how})", delete=False)
        elif event.worker in self.lost and not self.lost[event.worker].stopped:
            how = event.why or event.signal or f"exit code {event.code}"
            self._say("worker", f"worker {event.worker} has ended: {how}")
        lost = self.lost.pop(event.worker, None)
        if lost is not None and not lost.stopped and not lost.last_words:
            self._judge(lost, event)

    def _judge(self, w: Worker, event: ev.Gone) -> None:
        """Charge an end that nobody asked for to its cause. The worker said no last words."""
        if event.free or event.signal in OUTSIDE_SIGNALS:
            return
        if w.expected:
            return  # why it ends was told to an earlier master
        if event.signal and w.in_broken_ring:
            return  # crashed inside a ring that a peer's death had broken: nobody's fault
        how = f"crashed ({event.signal})" if event.signal else f"ended by itself with exit code {event.code}"
        if event.why:
            how += f": {event.why}"
        self._charge(w, f"worker {w.id} {how}", "")

    def _on_word(self, event: ev.Event) -> None:
        """A worker said something on its stream."""
        w = self.pool.get(event.worker)  # type: ignore[union-attr]  # all that is left has a worker
        if w is None:
            if not isinstance(event, ev.Closed):  # which only ends what is known to have ended
                self.stale += 1
            if isinstance(event, ev.Hello):
                self._do(ev.Fence(event.worker, "this worker was given up"))
            return
        w.heard = self._now
        match event:
            case ev.Hello():
                if w.state == "asked":
                    w.since = self._now
                if w.state in ("asked", "starting"):
                    w.goes("hello")
                w.expected = w.expected and event.back
            case ev.Ready():
                self._on_ready(w, event)
            case ev.Back():
                self._on_back(w, event)
            case ev.Beat() if not w.in_ring or event.generation != self.generation:
                w.memory = event.memory  # it lives; what it says of a ring is none of this one
            case ev.Up() | ev.Stepped() | ev.Want() | ev.Out() if (
                not w.in_ring or event.generation != self.generation
            ):
                self.stale += 1
            case ev.Up():
                self._on_up(w, event)
            case ev.Stepped():
                self._on_stepped(w, event)
            case ev.Beat():
                self._on_beat(w, event)
            case ev.Want():
                w.wants = True
            case ev.Out():
                self._on_out(w, event)
            case ev.Leaving():
                self._retire(w, event.why)
            case ev.Failed():
                self._on_failed(w, event)
            case ev.Finished():
                self._on_finished(w, event)
            case ev.Closed():
                self._lose(w, "ended as asked" if w.stopped else event.why)

    def _on_ready(self, w: Worker, event: ev.Ready) -> None:
        if w.state not in ("asked", "starting", "warming"):
            return
        if w.state != "warming":
            w.goes("hello")
        if not self._warm(w, event.records):
            return
        self._say("worker", f"worker {w.id} is ready after {self._now - w.since:.1f} s")

    def _warm(self, w: Worker, records: int) -> bool:
        """The worker can train; False: not on this job's data."""
        w.goes("ready")
        self.early_deaths = 0
        if self.leases is None:
            self.leases = Leases(records, self.config.training.epochs)
        elif self.leases.size != records:
            why = f"worker {w.id} counts {records} records in the data, the job has {self.leases.size}"
            self._on_failed(w, ev.Failed(w.id, why))
            return False
        if self.regroup_at is None:
            self.regroup_at = self._now + self.config.elastic.join_seconds
        return True

    def _on_back(self, w: Worker, event: ev.Back) -> None:
        """An earlier master had this worker; this is what it is by now.

        What it holds of leases does not matter: when its ring has been left, what is open is
        computed anew from what is applied.
        """
        if w.state != "warming":
            self.stale += 1
            return
        w.expected = False
        if not self._warm(w, event.records):
            return
        if event.out is not None:
            w.holds, w.step, w.applied = event.out.holds, event.out.step, event.out.applied
            w.skipped, w.digest = event.out.skipped, event.out.digest
        if not event.generation:
            return
        w.goes("placed")
        w.holds = w.holds or event.up
        if event.generation < self.generation and not event.left:
            self._give_up(w)
        elif event.generation >= self.generation:
            self._learn_of_ring(event)
            w.in_ring = not event.left
            w.up_in = event.generation if event.up else w.up_in

    def _learn_of_ring(self, event: ev.Back) -> None:
        if event.generation == self.generation:
            return
        for w in self._ring():  # of an older one: whoever the earlier master had given up
            self._give_up(w)
        self.generation, self.members, self.closing = event.generation, event.members, ""
        size = len(event.members)
        change = Change(event.generation, event.members, "taken over", True, self._now, size)
        change.told = True
        self.changes.append(change)

    def _give_up(self, w: Worker, why: str = "it was in a ring that the others have left") -> None:
        w.in_ring = False
        self._do(ev.Fence(w.id, why))
        self._lose(w, why)

    def _on_up(self, w: Worker, event: ev.Up) -> None:
        w.up_in, w.holds, w.step = event.generation, True, event.step
        change = self.changes[-1]
        change.step = max(change.step, event.step)
        if change.up_seconds is None and all(m.up_in == self.generation for m in self._ring()):
            change.up_seconds = self._now - change.formed_at
            if not self.closing:
                self.goodput.turn("useful", self._now)

    def _on_stepped(self, w: Worker, event: ev.Stepped) -> None:
        change = self.changes[-1]
        if w.id in change.stepped:
            return
        change.stepped.add(w.id)
        change.stall_seconds = max(change.stall_seconds, event.stall_seconds)
        change.redone_records += event.redone_records
        self.goodput.redo(event.wasted_seconds / max(len(self.members), 1))
        if change.stepped >= set(self.members):
            self._tell(change)

    def _on_beat(self, w: Worker, event: ev.Beat) -> None:
        w.step, w.rate, w.memory = event.step, event.rate, event.memory
        self.step = max(self.step, event.step)
        self.loss = event.loss if event.loss is not None else self.loss
        if event.applied is None or self.leases is None or self.closing:
            return
        if len(event.applied) < len(self.leases.applied):
            return  # older than what the root said when the ring was formed
        epoch = self.leases.done_epochs
        self.leases.progress(event.applied)
        for m in self._ring():
            m.leases = tuple(r for r in m.leases if not event.applied.covers(*r))
        self._tell_epoch(self.leases, epoch)

    def _on_out(self, w: Worker, event: ev.Out) -> None:
        w.in_ring, w.step, w.holds = False, event.step, w.holds or event.holds
        w.applied, w.skipped, w.digest = event.applied, event.skipped, event.digest
        w.wants = False
        self._close(f"worker {w.id}: {event.broken}" if event.broken else "left together", not event.broken)

    def _on_failed(self, w: Worker, event: ev.Failed) -> None:
        w.last_words = event.why
        self._lose(w, event.why)
        if w.stopped:
            return  # it was told to end: that its work broke off is what was wanted
        if event.fatal:
            self.traceback = event.traceback
            self._end("Failed", event.why)
        else:
            self._charge(w, event.why, event.traceback)

    def _on_finished(self, w: Worker, event: ev.Finished) -> None:
        if w.id != self.exporter:
            self.stale += 1
            return
        self.metrics, self.model, self.skipped = dict(event.metrics), event.model, w.skipped
        if self.metrics:
            found = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
            self._say("end", f"Evaluation on the held-out records: {found}")
        assert self.leases is not None
        reason = f"every record of {self.leases.epochs} epochs is applied exactly once"
        if self.skipped:
            reason += f", but {len(self.skipped)} that were skipped (non-finite)"
        self._end("Succeeded", reason)

    # --- what follows from the state

    def _reconcile(self) -> None:
        self._drop_the_silent()
        if self.ending is None:
            known = self._taken_over()
            self._scale()
            if known:
                self._regroup()
                self._form()
                self._release()
                self._grant()
        else:
            self._let_all_go()

    def _drop_the_silent(self) -> None:
        elastic = self.config.elastic
        for w in list(self.pool):
            if w.kill_at is not None:
                if w.kill_at <= self._now:
                    self._do(ev.Delete(w.id, 0.0))
                    self._lose(w, "did not end when asked to", delete=False)
            elif w.state in ("starting", "warming"):
                if w.since + elastic.start_seconds <= self._now:
                    why = f"worker {w.id} was not ready after {elastic.start_seconds:g} s (it was {w.state})"
                    self._do(ev.Fence(w.id, why))
                    w.last_words = why
                    self._lose(w, why)
                    self._charge(w, why, "")
            elif w.state != "asked" and w.heard + elastic.silence_seconds <= self._now:
                why = f"not heard of for {self._now - w.heard:.1f} s"
                self._do(ev.Fence(w.id, why))
                w.last_words = why  # whatever ends it later, this was not its own doing
                self._lose(w, why)

    def _taken_over(self) -> bool:
        """Whether the ring is known. A new master waits for those whom an earlier one had.

        Once all members are back it has their ring left: what they say then is all that is needed
        to go on. Until then they train on what they have. Nobody starts anew while a worker that
        may hold the state can still come back.
        """
        if self.takeover_at is None:
            return True
        expected = [w for w in self.pool if w.expected]
        awaited = [w for w in expected if w.id in self.members] if self.members else expected
        if awaited and self.takeover_at > self._now:
            return False
        if expected and not any(w.holds for w in self.pool):
            latest = max(w.since for w in expected) + self.config.elastic.start_seconds
            if latest > self._now:
                self.takeover_at = latest
                return False
        self.takeover_at = None
        for w in awaited:
            self._give_up(w, "it did not come back to the new master")
        if self.members:
            ring = self._ring()
            whole = len(ring) == len(self.members) and all(w.up_in == self.generation for w in ring)
            self.fallen = not whole
            self._close("the master is a new one", planned=whole)
        return True

    def _scale(self) -> None:
        """Have as many workers as wanted: ask for the missing, retire the newest of too many."""
        if self.began_at is None or self.exporter is not None:
            return
        staying = self.pool.staying
        for w in sorted(staying, key=_seniority)[self.target :]:
            self._retire(w, f"scaled to {self.target}")
        if self.create_at <= self._now and not self.paused:
            for _ in range(self.target - len(staying)):
                self._do(ev.Create(self.pool.add(self._now).id))

    def _regroup(self) -> None:
        """Ask a running ring to leave at a step boundary when another ring is wanted."""
        if not self.members or self.closing or self.leases is None:
            return
        if self.leases.complete:
            self._close("every record is applied", planned=True)
            return
        if self.paused:
            self._close(PAUSED, planned=True)
            return
        if self.regroup_at is None or self.regroup_at > self._now:
            return
        self.regroup_at = None
        wanted = {w.id for w in stayers(list(self.pool), self.members, self._limits())}
        if not wanted or wanted == set(self.members):
            return
        came, went = sorted(wanted - set(self.members)), sorted(set(self.members) - wanted)
        changes = [f"worker {w} joins" for w in came] + [f"worker {w} leaves" for w in went]
        self._close(", ".join(changes), planned=True)

    def _form(self) -> None:
        """Form the next ring as soon as nobody is in one, or have the finished state exported."""
        if self.leases is None or self.exporter is not None:
            return
        if (self.members and not self.closing) or any(w.in_ring for w in self.pool):
            return
        out = [w for w in self.pool if not w.stopped]
        fresh = not any(w.holds for w in out)
        late = not all(w.warm for w in self.pool.staying)
        if fresh and late and self.regroup_at is not None and self.regroup_at > self._now:
            return  # nobody waits with the state: give those who are late for the start a moment
        limits, whole = self._limits(), self.leases.size * self.leases.epochs
        if any(w.holds and w.applied.covers(0, whole) for w in out):
            limits = Limits(1, limits.most)  # nothing is left to train, and one can save it alone
        elif self.paused:
            self._wait(PAUSED)
            return
        ring = choose(out, self.members, limits)
        if self.members and self.changes:
            self._tell(self.changes[-1])
        if fresh and self.leases.applied and ring.members:
            self.restarts += 1
            self._say(
                "ring",
                f"every worker that held the state is gone: {len(self.leases.applied)} "
                "records of training are lost, the job starts again from its first record",
            )
        if not ring.members:
            self._wait(ring.reason)
            return
        root = self.pool[ring.root] if ring.root is not None else None
        applied = root.applied if root is not None and root.holds else RangeSet()
        for w in self.pool:
            if not self._share(w.id, ring.members):  # who has no part in the batch could never use it up
                w.leases = ()
        epoch = self.leases.done_epochs
        self.leases.rebase(applied, (r for w in self.pool for r in w.leases))
        self._tell_epoch(self.leases, epoch)
        if self.leases.complete:
            self._export(ring)
        else:
            self._publish(ring)

    def _publish(self, ring: Ring) -> None:
        assert self.leases is not None
        assert ring.root is not None
        cause = self.closing or ("start" if self.generation == 0 else self.waited or "start again")
        self.generation = Generation(self.generation + 1)
        self.changes.append(
            Change(self.generation, ring.members, cause, self.planned, self._now, len(self.members))
        )
        self.members, self.closing, self.planned, self.regroup_at = ring.members, "", True, None
        self.waited = ""
        self.fallen = False
        self.step = self.pool[ring.root].step
        leases = []
        for w in self.pool:
            w.wants = False
            w.leases = RangeSet.of(w.leases).minus(self.leases.applied).ranges
        for m in ring.members:
            w = self.pool[m]
            if w.state == "ready":
                w.goes("placed")
            w.in_ring = True
            leases.append(w.leases)
        self.reason = f"ring {self.generation}: {ring.reason}"
        self.goodput.turn("starting" if self.generation == 1 else "re-forming", self._now)
        self._do(ev.Form(self.generation, ring.members, ring.root, ring.sync, tuple(leases)))
        if set(ring.members) != {w.id for w in stayers(list(self.pool), ring.members, self._limits())}:
            self.regroup_at = self._now  # a hand-over: change again as soon as it is done

    def _wait(self, reason: str) -> None:
        self.members, self.closing = (), ""
        self.reason = reason
        self.waited = "resumed" if self.paused else "workers are back"
        kind = "paused" if self.paused else "waiting for workers"
        if self.generation > 0 and self.goodput.kind != kind:
            self.goodput.turn(kind, self._now)
            self._say("ring", f"no ring: {reason}")

    def _export(self, ring: Ring) -> None:
        """The state is complete: have one holder evaluate and save it. The others keep theirs."""
        assert ring.root is not None
        root = self.pool[ring.root]
        self.members, self.closing = (), ""
        for w in self.pool:
            w.leases = ()  # should the last step go with its one holder, it is handed out anew
        same = [w for w in self.pool if w.holds and w.step == root.step and w.digest]
        self.digests = {w.id: w.digest for w in same}
        if len(set(self.digests.values())) > 1:
            self._end("Failed", f"the weights differ between workers: {self.digests}")
            return
        self.exporter = root.id
        self.goodput.turn("useful", self._now)  # evaluating is not a price of elasticity
        self.reason = f"all records are applied at step {root.step}; worker {root.id} evaluates and saves"
        self._say("ring", self.reason)
        self._do(ev.Export(root.id))

    def _release(self) -> None:
        """Let those go who were asked to leave, but never the last who holds the state.

        Who is still in the ring that the leaving one has left is no heir yet: it may be frozen,
        and then what the other takes away is the last copy.
        """
        for w in self.pool:
            if w.state != "leaving" or w.stopped or w.in_ring or w.id == self.exporter:
                continue
            left = w.id in self.members
            heirs = (o for o in self.pool if o.state != "leaving" and o.holds and not (left and o.in_ring))
            if not w.holds or any(heirs):
                self._stop(w, "leaves the job")

    def _grant(self) -> None:
        if self.leases is None or not self.members or self.closing:
            return
        for w in self._ring():
            share = self._share(w.id, self.members)
            if w.wants and w.up_in == self.generation and share:
                lease = self.leases.grant(len(self.members), share, self.config.elastic.lease_batches)
                if lease is None:
                    return
                w.leases, w.wants = (*w.leases, lease), False
                self._do(ev.Grant(w.id, lease))

    def _let_all_go(self) -> None:
        assert self.ending is not None
        for w in self.pool:
            if not w.stopped:
                self._stop(w, f"the job ends: {self.ending[0]}")
        if not self.ended and not any(True for _ in self.pool):
            self.ended, self.ended_at = True, self._now
            self.goodput.turn(self.goodput.kind, self._now)
            self._do(ev.End(*self.ending))

    # --- small verbs

    def _ring(self) -> list[Worker]:
        """The members of the current ring that live and are in it."""
        return [w for m in self.members if (w := self.pool.get(m)) is not None and w.in_ring]

    def _share(self, worker: WorkerId, members: tuple[WorkerId, ...]) -> int:
        """Records of each global batch that fall to the worker; 0 outside the ring."""
        if worker not in members:
            return 0
        return local_batch(self.config.training.batch_size, members.index(worker), len(members))

    def _limits(self) -> Limits:
        return Limits(self.least, self.target)

    def _close(self, why: str, planned: bool) -> None:
        """Have every member leave the ring: at a step boundary, or by a cut when it is broken."""
        if not self.members:
            return
        if not self.closing:
            self.closing, self.planned = why, planned
            self.goodput.turn("re-forming", self._now)
            if planned and (ring := self._ring()):
                self._do(ev.Leave(self.generation, tuple(w.id for w in ring)))
        elif self.planned and not planned:
            self.closing, self.planned = f"{self.closing}; {why}", False
        elif not planned:
            return  # cut already
        if not planned and (ring := self._ring()):
            self._do(ev.Cut(self.generation, tuple(w.id for w in ring)))

    def _retire(self, w: Worker, why: str) -> None:
        if w.state == "leaving":
            return
        self._say("worker", f"worker {w.id} is to leave: {why}")
        if w.in_ring:
            self.regroup_at = self._now
        elif w.state in ("asked", "starting", "warming"):
            self._stop(w, why)
            return
        w.goes("leave")

    def _lose(self, w: Worker, why: str, delete: bool = True) -> None:
        """The worker is out of the job for good."""
        if not w.stopped:
            if w.state in ("asked", "starting", "warming"):
                self._back_off()
            self._say("worker", f"worker {w.id} is lost: {why}")
        if delete:
            self._do(ev.Delete(w.id, self.config.elastic.grace_seconds))
        self.lost[w.id] = w
        # Not `closing`: the peers of one that crashes often say that the ring broke before its end is seen.
        w.in_broken_ring = w.in_ring and self.fallen
        in_ring, w.in_ring = w.in_ring, False
        w.goes("gone")
        self.pool.forget(w)
        if w.id == self.exporter:
            self.exporter = None
        if in_ring:
            self.fallen = True
            self._close(f"worker {w.id} is lost ({why})", planned=False)

    def _back_off(self) -> None:
        self.early_deaths += 1
        doublings = min(self.early_deaths - 1, MOST_DOUBLINGS)
        pause = min(FIRST_BACKOFF_SECONDS * 2**doublings, MOST_BACKOFF_SECONDS)
        self.create_at = self._now + pause

    def _charge(self, w: Worker, why: str, traceback: str) -> None:
        self.failures.append(Failure(w.id, why, traceback))
        most = self.config.elastic.max_failures
        self._say("fail", f"{why} (failure {len(self.failures)}, {most} allowed)")
        if len(self.failures) > most:
            self.traceback = traceback or self.traceback
            self._end("Failed", why)

    def _stop(self, w: Worker, why: str) -> None:
        if w.state in ("asked", "starting"):  # nobody is listening yet
            self._do(ev.Delete(w.id, self.config.elastic.grace_seconds))
        else:
            self._do(ev.Stop(w.id, why))
        if w.state != "leaving":
            w.goes("leave")
        w.stopped = True
        w.kill_at = self._now + self.config.elastic.grace_seconds

    def _end(self, phase: str, reason: str) -> None:
        if self.ending is None:
            self.ending, self.reason = (phase, reason), reason
            self._say("end", f"{phase}: {reason}")

    def _tell(self, change: Change) -> None:
        """The one line that people look for after a change of the ring."""
        if change.told:
            return
        change.told = True
        text = f"ring {change.from_size} -> {len(change.members)}"
        if not change.stepped:
            text += " broke before its first step"
        elif change.from_size:
            text += f" in {change.stall_seconds:.2f} s, {change.redone_records} records redone"
        self._say("ring", f"{text} ({change.cause})")

    def _tell_epoch(self, leases: Leases, before: int) -> None:
        if leases.done_epochs > before:
            loss = "" if self.loss is None else f", loss {self.loss:.4f}"
            self._say("epoch", f"epoch {leases.done_epochs} of {leases.epochs} is applied{loss}")

    def _say(self, kind: str, text: str) -> None:
        self._do(ev.Say(kind, text))

    def _do(self, effect: ev.Effect) -> None:
        self._effects.append(effect)


def _seniority(w: Worker) -> tuple[bool, bool, bool, int]:
    """Who is kept when the pool shrinks: holders first, then the warm, then the oldest."""
    return (not w.holds, not w.in_ring, not w.warm, w.id)
