# SPDX-License-Identifier: Apache-2.0
"""The running proof of a job, computed from the lines of its journal and from nothing else.

It shares no code with the master's decisions. From the recorded events and effects it checks at every line:

- A ring continues from the step of its root. This step never falls below a step that every member of a ring
  had, unless all workers with that step were lost and the loss was reported.
- A checkpoint is completed only if no two of its writers reported different digests of their state, and
  states are discarded for an older one only if some differed.
- Every ring uses the data layout and the number of epochs of the job, and divides each step over its
  members.

It also counts how often a loop of the user's own went on from a worker that had received its state and was
never compared with the others. The members of a ring compare their states in its second step.

A script that was written for Horovod reads its own data. Its steps are the commits that its workers have
reported, in one epoch without an end, and no record is in the proof.

The size of a proof does not depend on the job's length. `edl audit` updates it over the lines that it reads.
The master updates it too and writes it at the head of each segment, so earlier segments can be deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from edl.contract.layout import Layout
from edl.contract.modes import HOROVOD, TRAIN, is_asynchronous, task_of
from edl.contract.ranges import RangeSet
from edl.contract.reasons import Reason
from edl.contract.steps import Steps
from edl.errors import EdlError

Entry = Mapping[str, Any]
_NONE: Entry = {}
COMPARED = 2  # steps of a ring after which the states of its members have been compared
NOT_A_MASTERS = (LookupError, TypeError, ValueError, AttributeError, AssertionError)
"""Exceptions that are raised by a line that no master has written."""


class AuditFailed(EdlError):
    """A record was lost or counted twice, or the journal contradicts itself."""


@dataclass(frozen=True, slots=True)
class Out:
    """State that a worker reported when it last left a ring."""

    step: int = 0
    skipped: RangeSet = field(default_factory=RangeSet)  # steps that are not in it
    bad: dict[int, int] = field(default_factory=dict)  # number of omitted records by epoch
    digest: str = ""  # digest of the state, if training was complete

    @staticmethod
    def of(event: Entry) -> Out:
        """Read a member's state from its report in the journal."""
        skipped = RangeSet.of((a, b) for a, b in event.get("skipped", _NONE).get("ranges", ()))
        bad = {int(epoch): count for epoch, count in event.get("bad", _NONE).items()}
        return Out(event["step"], skipped, bad, event.get("digest", ""))


@dataclass
class JournalProof:
    """The proof after `lines` events."""

    lines: int = 0  # events that the proof covers
    wrong: str = ""  # the first error that a master found in deleted segments; empty: none
    epochs: int = 0
    batch: int = 0
    seed: int = 0
    shuffle: bool = False
    layout: Layout | None = None
    generation: int = 0
    members: set[int] = field(default_factory=set)
    root_step: int = 0  # the step from which the ring continued
    joined: set[int] = field(default_factory=set)  # members that have joined the ring
    safe: int = 0  # a step that every member of a ring had
    out: dict[int, Out] = field(default_factory=dict)  # by worker
    skipped: RangeSet = field(default_factory=RangeSet)  # steps that are not in the model
    bad: dict[int, int] = field(default_factory=dict)  # number of omitted records by epoch
    named: set[tuple[int, int]] = field(default_factory=set)  # epoch and record of reported ones
    synced: set[int] = field(default_factory=set)
    exported: int | None = None  # step of the worker that saved the model
    kept: int = 0  # step of a copy of the model in a file
    differ: bool = False  # whether members have held different states
    untrusted_up_to: int = 0  # states of this ring and of earlier rings are void
    rings: int = 0
    losses: int = 0
    begins: bool = False  # the ring's root had no state, or loads it from a checkpoint
    had: int = 0  # then: a step that all members of earlier rings had, until a member reports the ring's
    resumed: int = 0  # the step that the first ring began with
    mode: str = "train"
    finished: set[int] = field(default_factory=set)  # workers whose script has ended by itself (mode=horovod)
    on_servers: bool = False  # the whole state is on servers: no worker has to hold it
    evaluated: dict[str, int] = field(default_factory=dict)  # by split: records of the last complete pass
    stopped: int = 0  # epochs after which training ends, because a callback has stopped it
    own_loop: bool = False  # a script with edl.join: its `state` may lack something
    uncompared: set[int] = field(
        default_factory=set
    )  # members of an own loop that have only received a state
    unproved: int = 0  # how often an own loop went on from one of them
    inherited: bool = False  # an earlier master formed rings before the first line; its journal is not here
    unseen: int = 0  # steps made before the first line, as far as the lines show

    @staticmethod
    def load(kept: Any) -> JournalProof:
        """Load what `dump` returned; None gives a new proof.

        Raises:
            ValueError: the data is not a journal proof.
        """
        try:
            return _ADAPTER.validate_python(kept) if kept is not None else JournalProof()
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    def dump(self) -> dict[str, Any]:
        """Convert the proof for JSON."""
        kept: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return kept

    def begin(self, values: Entry) -> None:
        """Update the proof for a master that begins with these values: the first, or one that took over.

        Raises:
            ValueError: `values` are not the values of a job.
        """
        try:
            training, data = values["training"], values["data"]
            self.mode = task_of(str(values.get("mode", "train")))
            self.on_servers = is_asynchronous(str(values.get("mode", "train")))
            self.epochs = int(training["epochs"]) if self.mode == TRAIN else int(self.mode == HOROVOD)
            self.batch = 1 if self.mode == HOROVOD else int(training["batchSize"])
            self.own_loop = self.mode == TRAIN and bool(values.get("model", {}).get("script"))
            self.stopped = 0  # workers whose state includes it report it again
            self.seed, self.shuffle = int(training["seed"]), bool(data["shuffle"])
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if self.batch < 1 or (self.mode == TRAIN and self.epochs < 1):
            raise ValueError(f"{self.epochs} epochs, batches of {self.batch}")

    def note(self, entry: Entry, where: str) -> None:
        """Update the proof with the next line.

        Raises:
            AuditFailed: the line contradicts those before it.
            NOT_A_MASTERS: the line was not written by a master.
        """
        self.lines += 1
        event = entry["event"]
        if self.lines == 1 and event["type"] == "Adopted":
            self._inherit(event.get("past") or {})
        self._note(entry, where)
        if event.get("generation") == self.generation and event.get("step", 0) >= self.root_step + COMPARED:
            self._compared()
        if self.inherited and not self.rings and not self.unseen:
            self.unseen = self.safe

    def _inherit(self, past: Entry) -> None:
        """Begin with what an earlier master knew, whose journal is not here."""
        self.safe = past.get("safe", 0)
        if past.get("ending") and past.get("layout"):  # then no ring follows
            self.inherited, self.layout = True, Layout(**past["layout"])
            self.safe = max(self.safe, past.get("done", 0))

    def _note(self, entry: Entry, where: str) -> None:
        event = entry["event"]
        match event["type"]:
            case "Ready" | "Resume" if self.layout is None:
                self.layout = Layout(**event["layout"])
        match event["type"]:
            case "Resume":
                if event["left_ring"] is not None:
                    self._note({"event": {**event["left_ring"], "type": "LeftRing"}, "effects": []}, where)
                if event["joined"]:
                    self.synced.add(event["worker"])
                if event["generation"] and not self.rings:
                    self.inherited = True
                self.generation = max(self.generation, event["generation"])
            case "JoinedRing":
                self.synced.add(event["worker"])
                self._joined(event, where)
            case "LeftRing":
                self.out[event["worker"]] = Out.of(event)
                if stop := event.get("stop", 0):
                    self.stopped = min(self.stopped or stop, stop)
                    self.epochs = min(self.epochs, self.stopped)
                if event["has_state"]:
                    self.synced.add(event["worker"])
            case "Gone":  # for good: this worker cannot be a root any more
                self.uncompared.discard(event["worker"])
                self.synced.discard(event["worker"])
                self.out.pop(event["worker"], None)
            # Events of an older ring come too late: the reports of its members on leaving it are newer.
            case "Progress" if event["generation"] == self.generation:
                # A member has completed a step in this ring. All took part, so they have the step before it.
                self.safe = max(self.safe, event["step"] - 1)
            case "Evaluated" if event["generation"] == self.generation and event.get("metrics"):
                self.evaluated[event["split"]] = event["records"]
            case "PartsWritten" if len({state for state, _ in event.get("states", ()) if state}) > 1:
                self.differ = True
                if any(effect["type"] == "Commit" for effect in entry["effects"]):
                    raise AuditFailed(
                        f"{where}: the checkpoint of step {event['step']} is completed, though its parts are "
                        "of different states"
                    )
            case "Finished" if self.mode == HOROVOD:
                self.finished.add(event["worker"])
            case "Saved" if event.get("step"):
                self.kept = event["step"]
            case "BadRecords" if event["generation"] == self.generation:
                self.named |= {(event["epoch"], int(record)) for record in event["records"]}
            case "EpochEnded" if event["generation"] == self.generation and self.layout is not None:
                steps = Steps(self.layout.records, self.batch)
                self.safe = max(self.safe, event["epochs"] * steps.per_epoch)
            case "Live" if self.mode == TRAIN and not any(
                e.get("reason") == Reason.SpecRefused for e in entry["effects"]
            ):
                epochs = int(event["epochs"])
                self.epochs = min(epochs, self.stopped or epochs)
        lost = any(effect.get("reason") == Reason.StateLost for effect in entry["effects"])
        for effect in entry["effects"]:
            match effect["type"]:
                case "Form":
                    self._form(effect, lost, where)
                case "Export":
                    if not self._ended_alike(effect["worker"]):
                        self._goes_on_uncompared(effect["worker"])
                    self.exported = self._goes_on(effect["worker"], lost, where)

    def _joined(self, event: Entry, where: str) -> None:
        if event["generation"] == self.generation and event["worker"] in self.members:
            if self.on_servers and not self.joined:
                self._found(event, where)
            elif event.get("rolled_back") and event["step"] != self.root_step and not self.begins:
                self._rolled_back(event, where)
            if self.begins and not self.joined:  # the first member to join reveals the ring's first step
                self.root_step = event["step"]
                self.losses += self.root_step < self.had
                self.had = 0
                if self.rings == 1 and self.inherited and self.on_servers:
                    self.unseen = event["step"]
                elif self.rings == 1:
                    self.resumed = event["step"]
            elif self.begins and event["step"] != self.root_step:
                raise AuditFailed(
                    f"{where}: worker {event['worker']} begins with step {event['step']}, the others of its "
                    f"ring with {self.root_step}"
                )
            self.joined.add(event["worker"])
            if self.joined == self.members:  # all members have the step that the ring began with
                self.safe = max(self.safe, self.root_step)

    def _found(self, event: Entry, where: str) -> None:
        """Update the proof with the step of the servers, which hold the state.

        Raises:
            AuditFailed: the servers are behind the step that they had, and no rollback was reported.
        """
        if event["step"] < self.safe:
            if not event.get("rolled_back"):
                raise AuditFailed(
                    f"{where}: step {self.safe} was on the servers and is lost: they are at step "
                    f"{event['step']}"
                )
            self.losses += 1
            self.safe = event["step"]

    def _rolled_back(self, event: Entry, where: str) -> None:
        """Update the proof for a ring that rolled back, with its servers, to a state all members agree on.

        Raises:
            AuditFailed: the rollback is to a later step than the ring's, or after a member has joined.
        """
        if event["step"] > self.root_step or self.joined:
            raise AuditFailed(
                f"{where}: worker {event['worker']} rolled back to step {event['step']}, its ring is at "
                f"{self.root_step}"
            )
        self.losses += event["step"] < self.safe
        self.root_step, self.safe = event["step"], min(self.safe, event["step"])

    def _form(self, form: Entry, lost: bool, where: str) -> None:
        self.rings += 1
        if form.get("untrusted_up_to", 0) > self.untrusted_up_to:
            self._give_up(form["untrusted_up_to"], where)
        self.generation, self.members, self.joined = form["generation"], set(form["members"]), set()
        if Layout(**form["layout"]) != self.layout:
            raise AuditFailed(f"{where}: the ring trains on {form['layout']}, the job on {self.layout}")
        if form["epochs"] != self.epochs:
            raise AuditFailed(f"{where}: the ring trains {form['epochs']} epochs, the job {self.epochs}")
        if len(form["shares"]) != len(form["members"]) or min(form["shares"]) < 0 or not any(form["shares"]):
            raise AuditFailed(f"{where}: {form['shares']} does not divide a step over {form['members']}")
        self.begins = form["root"] not in self.synced or self.on_servers
        if self.own_loop and not self.begins:
            if not (self.members & self.synced) - self.uncompared:  # else they are compared in this ring
                self._goes_on_uncompared(form["root"])
            self.uncompared |= self.members - self.synced
        self.root_step = 0 if self.on_servers else self._goes_on(form["root"], lost, where)
        if self.inherited and self.rings == 1 and not self.unseen:
            self.unseen = self.root_step

    def _give_up(self, untrusted_up_to: int, where: str) -> None:
        """Discard the states of all members, because they differed.

        Raises:
            AuditFailed: the states had not differed.
        """
        ends = {(out.step, out.digest) for w, out in self.out.items() if w in self.synced and out.digest}
        if not self.differ and len(ends) == len({step for step, _ in ends}):
            raise AuditFailed(f"{where}: the states of all members are given up, though none has differed")
        self.untrusted_up_to, self.differ = untrusted_up_to, False
        self.losses, self.safe = self.losses + 1, 0
        self.synced.clear()
        self.out.clear()
        self.uncompared.clear()

    def _compared(self) -> None:
        """Update the proof: the members of the ring have compared their states."""
        if len(self.members) > 1:
            self.uncompared -= self.members

    def _goes_on_uncompared(self, root: int) -> None:
        """Count the root if it has received its state and was never compared with a different worker."""
        self.unproved += root in self.uncompared
        self.uncompared.discard(root)

    def _ended_alike(self, worker: int) -> bool:
        """Whether the state that this worker reported last is that of a different worker, too."""
        ends = [(out.step, out.digest) for w, out in self.out.items() if w in self.synced and out.digest]
        out = self.out.get(worker, Out())
        return ends.count((out.step, out.digest)) > 1

    def _goes_on(self, root: int, lost: bool, where: str) -> int:
        """Continue from the state of this worker, or from an empty one if it holds none. Return the step.

        Args:
            lost: the loss of all workers with later states was reported.

        Raises:
            AuditFailed: steps that were in the model are lost, and no loss was reported.
        """
        out = self.out[root] if root in self.synced else Out()
        if root in self.synced and out.step < self.safe and not lost:
            raise AuditFailed(
                f"{where}: step {self.safe} was in the model and is lost: it goes on from {out.step}"
            )
        if root in self.synced:
            self.losses += out.step < self.safe
            self.had = 0
        else:
            self.had = max(self.had, self.safe)
        self.safe, self.skipped, self.bad = min(self.safe, out.step), out.skipped, out.bad
        return out.step


_ADAPTER = TypeAdapter(JournalProof)
