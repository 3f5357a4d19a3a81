# SPDX-License-Identifier: Apache-2.0
"""`edl audit`: an independent verification of a job's journal.

It shares no code with the master's decisions. It reads the existing segments from the oldest on and checks

- at every line, that it is as it was written: the chain of hashes holds (`edl.journal.format`);
- at every line, that it does not contradict the lines before it (`edl.journal.proof`);
- at every head of a segment, that the proof written by the master equals the proof of the lines before it;
- at the end, that the model has all steps of all epochs, and that each epoch's order has every record once.

exports.json must have the SHA-256 that its writer, a worker, has reported, and the files of the exported
model must be those that it lists. The checkpoints that this job has completed must be undamaged, as far as
they still exist.

If a master has taken over from an earlier one in the same directory, the proof continues. The journal of the
earlier master may be missing, as after a failover in a cluster, or the oldest segments may have been deleted
to keep the journal within `journal.maxBytes`. The audit then begins with the takeover, or with the proof at
the oldest existing head, and its verdict states how much it has not verified itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edl.checkpoints import Store
from edl.contract import artifacts, exports
from edl.contract.modes import HOROVOD, TRAIN
from edl.contract.order import Order
from edl.contract.phases import Phase
from edl.contract.steps import Steps
from edl.errors import CheckpointDamaged, CheckpointError, CheckpointRemoved, EdlError
from edl.formatting import how_many, one_line
from edl.journal.format import JournalDamaged, JournalReader, segments
from edl.journal.proof import NOT_A_MASTERS, AuditFailed, Entry, JournalProof, Out

AT_ONCE = 1 << 20  # positions of an order that are checked together
WINDOW = 1 << 15  # positions that are computed together; each takes a fifth of its time in a step's window

__all__ = ["AuditFailed", "Elsewhere", "audit"]


@dataclass(frozen=True)
class Elsewhere:
    """Access to a job's exported files when they are not on this machine.

    Args:
        digest: returns the SHA-256 of an exported file, by its path beside exports.json. It raises OSError if
            the file cannot be read.
        no_exports: why no exported file can be read; empty if they can.
        no_checkpoints: why no checkpoint can be read.
    """

    digest: Callable[[str], str]
    no_exports: str
    no_checkpoints: str


def audit(output: Path, elsewhere: Elsewhere | None = None) -> str:
    """Check the job in `output`; return the verdict as text.

    Args:
        elsewhere: access to the files that the job has exported; None: they are in `output`.

    Raises:
        AuditFailed: the check failed; the message names the first step, record or line that is wrong.
        EdlError: the journal is missing or damaged; the message names the file and the line.
        JournalDamaged: a segment does not continue the one before it.
    """
    summary = artifacts.read_summary(output) if artifacts.has_ended(output) else None
    readers = segments(output)
    first, last = readers[0], readers[-1]
    unseen = _at_head(first)
    proof, kept, chain = _read_all(readers)
    if summary is None:
        verdict = _unfinished(proof, kept, "the job has not ended; so far,") + _reservations(proof, {})
        return f"{verdict}; the journal so far ends with {chain}"
    last.check_end(summary)
    try:
        verdict = _verdict(proof, kept, summary)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EdlError(
            f"{output / artifacts.SUMMARY}: not what a master writes ({type(error).__name__}: {error})"
        ) from error
    if last.head["values"].get("training", {}).get("deterministic") and (ended := _last_epoch(kept)):
        verdict += f"; deterministic: SHA-256 {ended['sha256']} after epoch {ended['epochs']}"
    verdict += _exports(output, summary, kept.list_sha256, elsewhere)
    where = last.head["values"].get("checkpoint", {}).get("dir", "")
    verdict += _checkpoints(where, kept.checkpoints, elsewhere)
    if unseen.lines:
        verdict += (
            f"; read here: the last {proof.lines - unseen.lines:,} of {proof.lines:,} events, from step "
            f"{unseen.safe:,} on; for those before, which are not kept (journal.maxBytes), the proof at "
            f"the head of {first.path.name} stands"
        )
    return f"{verdict}; the journal ends with {chain}"


def same(output: Path, other: Path) -> str:
    """Compare two deterministic jobs, epoch by epoch; return the verdict as text.

    Raises:
        AuditFailed: they part, or at least one of them was not deterministic; the message names the epoch.
        EdlError: a journal is missing or damaged; the message names the file and the line.
        JournalDamaged: a segment does not continue the one before it.
    """
    ours, theirs = (_read_all(segments(path))[1] for path in (output, other))
    epochs = [kept.epochs for kept in (ours, theirs)]
    common = sorted(epoch for epoch in epochs[0].keys() & epochs[1].keys() if _digest_of(epochs[0][epoch]))
    if not common or not all(_digest_of(epochs[1][epoch]) for epoch in common):
        raise AuditFailed(f"{output} and {other} have no epoch in common that training.deterministic trained")
    for epoch in common:
        pairs = zip(
            ("SHA-256", "loss", "metrics"), *(_digest_of(each[epoch]) for each in epochs), strict=True
        )
        for what, mine, its in pairs:
            if mine != its:
                raise AuditFailed(f"{output} and {other} part in epoch {epoch}: {what} {mine}, and {its}")
    for step, split in sorted(ours.evaluations.keys() & theirs.evaluations.keys()):
        found = [kept.evaluations[step, split] for kept in (ours, theirs)]
        if found[0] != found[1]:
            raise AuditFailed(
                f"{output} and {other} part in the evaluation of data({split!r}) after step {step}: "
                f"{found[0]}, and {found[1]}"
            )
    final = [_final_digests(path) for path in (output, other)]
    if max(epochs[0]) == max(epochs[1]) and all(final) and final[0] != final[1]:
        raise AuditFailed(
            f"{output} and {other} part after their last epoch: digests {final[0]}, and {final[1]}"
        )
    return f"the same bits after each of {how_many(len(common), 'epoch')} as {other}"


def _digest_of(ended: Entry) -> tuple[Any, ...]:
    """What must be equal after an epoch, if two jobs are; empty if it is unknown."""
    found = ended.get("sha256")
    return (found, ended.get("loss"), ended.get("metrics")) if found else ()


def _final_digests(output: Path) -> set[str]:
    """The digests with which the workers have ended; empty if the job has not ended."""
    return set(artifacts.read_summary(output)["digests"].values()) if artifacts.has_ended(output) else set()


def _last_epoch(kept: _Kept) -> Entry | None:
    return max(filter(_digest_of, kept.epochs.values()), key=lambda ended: int(ended["epochs"]), default=None)


def _read_all(readers: Sequence[JournalReader]) -> tuple[JournalProof, _Kept, str]:
    """Read all segments. Returns the proof, the files and epochs that they record, and the last hash.

    Raises:
        JournalDamaged: a segment does not continue the one before it.
    """
    proof, kept, chain = _at_head(readers[0]), _Kept(), readers[0].after
    for reader in readers:
        if reader.after != chain:
            raise JournalDamaged(reader.path, 1, "does not go on from the end of the segment before it")
        _read(reader, proof, kept)
        chain = reader.link.chain
    return proof, kept, chain


def _at_head(reader: JournalReader) -> JournalProof:
    """Load the proof that the master wrote at the head of this segment.

    Raises:
        JournalDamaged: the head has no valid proof.
        AuditFailed: the master had found a violation before this segment.
    """
    try:
        proof = JournalProof.load(reader.head["proof"])
    except ValueError as error:
        raise JournalDamaged(reader.path, 1, f"its proof is not one ({error})") from error
    if proof.wrong:
        raise AuditFailed(f"{reader.path}: line 1: before it, the master has found: {proof.wrong}")
    return proof


@dataclass
class _Kept:
    """Files that the journal records: completed checkpoints and the digest of exports.json."""

    checkpoints: set[tuple[int, str]] = field(default_factory=set)  # step and attempt
    newest: int = 0  # step of the last checkpoint since the newest ring was formed; 0: none
    writer: Out = field(default_factory=Out)  # its writer's state, if the writer had left that ring
    list_sha256: str = ""  # SHA-256 of exports.json; empty: not reported
    epochs: dict[int, Entry] = field(default_factory=dict)  # by number, how each epoch has ended
    evaluations: dict[tuple[int, str], Any] = field(default_factory=dict)  # metrics by step and split


def _exports(output: Path, summary: dict[str, Any], list_sha256: str, elsewhere: Elsewhere | None) -> str:
    """Compare the exported files with their digests in exports.json, and exports.json with its own digest.

    Return the outcome as text.

    Raises:
        AuditFailed: a file or the list of files is missing or damaged, or its SHA-256 is wrong.
    """
    if not (exported := summary.get("exports")):
        return ""
    if elsewhere is not None and elsewhere.no_exports:
        return f"; exported files not verified: {elsewhere.no_exports}"
    model = Path(str(summary.get("model", "")))
    # A later run has a directory of its own. A master whose disk was full has written its summary to another
    # directory than the model's, and names the model by its absolute path.
    fetched = model.is_absolute() and (output / artifacts.EXPORTS).exists()
    beside = output if fetched else output / model.parent
    path = beside / artifacts.EXPORTS
    try:
        text = artifacts.read_whole(path)
        listed = exports.parse(text)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not list_sha256:  # for example if the disk was full
            return f"; exported files not verified: the job has reported no {artifacts.EXPORTS}"
        raise AuditFailed(
            f"{path}: cannot read: {error.strerror}; it holds the digests of the model"
        ) from error
    except exports.Damaged as error:
        raise AuditFailed(f"{path}: damaged ({error})") from error
    if list_sha256 not in ("", hashlib.sha256(text).hexdigest()):
        raise AuditFailed(f"{path}: its SHA-256 is not the one in the journal")
    if listed.keys() != exported.keys():
        raise AuditFailed(f"{path} lists {sorted(listed)}, {artifacts.SUMMARY} {sorted(exported)}")
    digest_of = partial(_digest, beside) if elsewhere is None else elsewhere.digest
    files = {name: about for export in listed.values() for name, about in export.places.items()}
    for name, about in files.items():
        file = beside / name
        try:
            found = digest_of(name)
        except OSError as error:
            raise AuditFailed(f"{file}: cannot read: {error.strerror}; the job has exported it") from error
        if found != about.sha256:
            raise AuditFailed(f"{file}: its SHA-256 is not the one in {artifacts.EXPORTS}")
    return f"; {how_many(len(files), 'exported file')} as written (SHA-256)"


def _digest(directory: Path, name: str) -> str:
    with open(directory / name, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _checkpoints(directory: str, committed: set[tuple[int, str]], elsewhere: Elsewhere | None) -> str:
    """Verify all bytes of the existing checkpoints of this job; return the outcome as text.

    Raises:
        AuditFailed: a checkpoint is damaged.
    """
    if not directory or not committed:
        return ""
    if elsewhere is not None:
        return f"; checkpoints not verified: {elsewhere.no_checkpoints}"
    verified = 0
    try:
        for checkpoint in Store.open(directory).checkpoints():
            if (checkpoint.step, checkpoint.attempt) in committed:
                with suppress(CheckpointRemoved):
                    checkpoint.verify()
                    verified += 1
    except CheckpointDamaged as error:
        raise AuditFailed(f"a checkpoint is damaged: {error}") from error
    except CheckpointError as error:  # an object store that cannot be reached
        return f"; checkpoints not verified: {one_line(str(error))}"
    return f"; {how_many(verified, 'checkpoint')} as written (SHA-256)"


def _read(reader: JournalReader, proof: JournalProof, kept: _Kept) -> None:
    """Update the proof with the lines of a segment, and collect the files that the segment records.

    Raises:
        AuditFailed: the proof at the segment's head is not that of the lines before it.
        JournalDamaged: a line is not one that a master writes.
    """
    if _at_head(reader) != proof:
        raise AuditFailed(f"{reader.path}: line 1: its proof is not what the lines before it show")
    if reader.begins:
        try:
            proof.begin(reader.head["values"])
        except ValueError as error:
            raise JournalDamaged(reader.path, 1, f"not the values of a job ({error})") from error
    for number, entry in reader:
        try:
            proof.note(entry, f"{reader.path}: line {number}")
            kept.checkpoints |= {(e["step"], e["attempt"]) for e in entry["effects"] if e["type"] == "Commit"}
            event = entry["event"]
            if event["type"] == "Checkpointed":  # without Commit if one worker has written all of it
                kept.checkpoints.add((event["step"], event["attempt"]))
                kept.newest, kept.writer = event["step"], proof.out.get(event["worker"], Out())
            elif event["type"] == "EpochEnded":
                kept.epochs[event["epochs"]] = event
            elif event["type"] == "Evaluated" and "metrics" in event:
                kept.evaluations[event["step"], event["split"]] = event["metrics"]
            elif event["type"] == "Finished":
                kept.list_sha256 = event.get("list_sha256", "")
            if any(effect["type"] == "Form" for effect in entry["effects"]):
                kept.newest = 0  # the ring may have gone on from an earlier state
        except NOT_A_MASTERS as error:
            raise JournalDamaged(
                reader.path, number, f"not what a master writes ({type(error).__name__}: {error})"
            ) from error


def _verdict(proof: JournalProof, kept: _Kept, summary: dict[str, Any]) -> str:
    if len(set(summary["digests"].values())) > 1:
        raise AuditFailed(f"the weights differ between workers: {summary['digests']}")
    if summary["phase"] != Phase.Succeeded and not _is_trained(proof):
        ended = f"{summary['phase']} ({one_line(summary['reason'])});"
        return _unfinished(proof, kept, ended) + _reservations(proof, summary)
    if proof.mode == HOROVOD:
        if not (proof.finished or proof.inherited):
            raise AuditFailed("no worker has reported the end of its script, though the job has succeeded")
        return _of_script(proof) + _reservations(proof, summary)
    if proof.layout is None:
        raise AuditFailed("no record was trained on, though the job has succeeded")
    if proof.mode != TRAIN:
        return _passed(proof)
    size = proof.layout.records
    steps = Steps(size, proof.batch)
    order = Order(proof.layout, proof.seed, proof.shuffle, WINDOW)
    done = _in_model(proof)
    end = steps.end(done, proof.epochs)
    if done < end:
        position = steps.begins_at(done)
        missing = steps.begins_at(end) - position
        raise AuditFailed(
            f"{_name(order, position)} was not applied; {missing} records are missing: "
            f"{done} of {end} steps are in the model"
        )
    if (told := summary["task"]["steps_done"]) != done:
        raise AuditFailed(f"{artifacts.SUMMARY} says {told} steps are in the model, the journal says {done}")
    epochs = steps.epoch(done) if size else proof.epochs
    for epoch in range(epochs if size else 0):
        _check_order(order, epoch)
    skipped = steps.records_of(proof.skipped)
    but = f", except {skipped} skipped records (non-finite)" if skipped else ""
    if bad := sum(proof.bad.values()):
        if bad != summary["records"]["bad"]:
            raise AuditFailed(
                f"{artifacts.SUMMARY} says {summary['records']['bad']} bad records, the journal {bad}"
            )
        unnamed = bad - len(proof.named)
        if proof.on_servers:  # records of whole steps: servers report their number, but not their ids
            but += f", except {bad} skipped records (non-finite)"
        else:
            but += f", except {bad} bad records" + (f", {unnamed} of them unnamed" * (unnamed > 0))
    once = "exactly once"
    if proof.unproved:
        once = (
            f"not proved: {how_many(proof.unproved, 'time')} the training went on from a worker that had "
            "received the state and was never compared with others, so a `state` that lacks something "
            "would not have been noticed. Counted once"
        )
    text = (
        f"{once}{but}: {how_many(size, 'record')} x {how_many(epochs, 'epoch')} in "
        f"{how_many(done, 'step')}, {how_many(proof.rings, 'ring')}; "
        f"{how_many(len(summary['digests']), 'worker')} ended with the same weights"
    )
    return text + _reservations(proof, summary)


def _in_model(proof: JournalProof) -> int:
    """The number of steps in the model that was exported, or else in a state that is safe."""
    return max(proof.safe, proof.kept) if proof.exported is None else proof.exported


def _is_trained(proof: JournalProof) -> bool:
    """Whether all steps are in the model: a failure afterwards, as of an evaluation, takes none out of it."""
    if proof.mode != TRAIN or proof.layout is None:
        return False
    done = _in_model(proof)
    return done > 0 and done >= Steps(proof.layout.records, proof.batch).end(done, proof.epochs)


def _unfinished(proof: JournalProof, kept: _Kept, phase: str) -> str:
    """The verdict on a job that runs, was stopped, or failed before all steps were made."""
    if proof.mode == HOROVOD:
        return f"{phase} {_of_script(proof)}"
    if proof.mode != TRAIN:
        return _passed(proof) if proof.evaluated else f"{phase} no pass over all records was completed"
    if proof.layout is None:
        return f"{phase} no step was trained"
    steps = Steps(proof.layout.records, proof.batch)
    done, end = max(proof.safe, proof.kept, kept.newest), steps.end(proof.safe, proof.epochs)
    state = kept.writer if kept.newest == kept.writer.step == done else proof
    if not done:
        return f"{phase} no step of {end:,} is known to be complete"
    order = Order(proof.layout, proof.seed, proof.shuffle, WINDOW)
    for epoch in range(steps.epoch(done - 1) + 1):
        _check_order(order, epoch)
    but = ""
    if left_out := steps.records_of(state.skipped) + sum(state.bad.values()):
        but = f", except {how_many(left_out, 'record')} that were left out"
    return f"{phase} {done:,} of {end:,} steps are trained: each of their records counted once{but}"


def _reservations(proof: JournalProof, summary: dict[str, Any]) -> str:
    """What the proof does not cover, and the state that was lost."""
    text = ""
    if proof.resumed:
        text += f"; the first {proof.resumed:,} steps are of the checkpoint that it went on from"
    if proof.unseen:
        text += (
            f"; the first {how_many(proof.unseen, 'step')} were made under an earlier master, whose journal "
            "is not here: not proved"
        )
    if forced := summary.get("forced"):
        text += f"; forced, and not proved here: {'; '.join(map(one_line, forced))}"
    if proof.losses:
        lost = "once" if proof.losses == 1 else how_many(proof.losses, "time")
        text += f"; the newest state was lost {lost} and training went on from what was left"
    return text


def _passed(proof: JournalProof) -> str:
    """The verdict on a job that does not train.

    Raises:
        AuditFailed: the job has not completed a pass over all records.
    """
    if not proof.evaluated:
        raise AuditFailed("no pass over all records was completed")
    ((split, records),) = proof.evaluated.items()
    done = "predicted" if proof.mode == "predict" else "evaluated"
    return (
        f"exactly once: each of the {records:,} records of data({split!r}) is {done}, in "
        f"{how_many(proof.rings, 'ring')}"
    )


def _of_script(proof: JournalProof) -> str:
    """The verdict on a script that was written for Horovod: its commits are known, its records are not."""
    commits = f"at least {how_many(proof.safe, 'commit')}" if proof.safe else "no commit"
    kept = ", and no ring began behind a commit that all members had" if proof.safe or proof.losses else ""
    if kept and proof.losses:
        kept += " without a report"
    ends = f"the script of {how_many(len(proof.finished), 'worker')} has ended by itself, after "
    return (
        f"{ends if proof.finished else ''}{commits} in {how_many(proof.rings, 'ring')}{kept}; not proved: "
        "records and weights, because a Horovod script reads its own data"
    )


def _check_order(order: Order, epoch: int) -> None:
    """Check that an epoch visits every record once: it has as many places as records, and covers them all.

    Raises:
        AuditFailed: a record is not visited.
    """
    size = order.layout.records
    seen = np.zeros(size, bool)
    for start in range(0, size, AT_ONCE):
        seen[order.records(epoch * size + start, epoch * size + min(start + AT_ONCE, size))] = True
    if not seen.all():
        raise AuditFailed(f"epoch {epoch + 1} does not visit record {int(np.argmin(seen))}")


def _name(order: Order, position: int) -> str:
    epoch = position // max(order.layout.records, 1)
    record = int(order.records(position, position + 1)[0])
    return f"record {record} of epoch {epoch + 1} (position {position})"
