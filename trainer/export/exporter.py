# SPDX-License-Identifier: Apache-2.0
"""The end of a job: save the trained model, then evaluate it on the held-out records.

Promise: no failure here loses the model. The trained variables are written before any of the user's code runs
(callbacks, get_config(), the evaluation), and are deleted once the whole model is saved. The model is saved
before it is evaluated. If it cannot be saved in the output directory, it is saved elsewhere. If it cannot be
saved whole at all, its weights are saved. A report to the master names the failure, and the files that were
saved.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import keras

from edl.contract import artifacts
from edl.contract.proto import edl_pb2 as pb
from edl.errors import EdlError, UserCodeError
from edl.trainer.agreement.metric_values import Value, as_numbers
from edl.trainer.evaluation.local_evaluation import evaluate
from edl.trainer.export import catalog, formats, samples, saved_file
from edl.trainer.export.model_saving import FAILURES, Kept, keep, may_pass, secure, temporary, write_whole
from edl.trainer.export.verification import Verification
from edl.trainer.model.user_model import UserModel
from edl.trainer.ring.base import RingBroken
from edl.trainer.runtime.error_report import format_error, format_traceback
from edl.trainer.runtime.log import log
from edl.trainer.runtime.watchdog import Hung, Limit, Watch
from edl.trainer.session.state import Session

# The parts of the end, as the master knows them.
SAVING, EXPORTING, VERIFICATION, EVALUATION = "saving", "export", "verification", "evaluation"
SLOWEST = 10_000_000  # bytes of a model that are written in a second where all else is slow
LOOK_SECONDS = 0.5  # between two looks whether there is room now


@dataclass(frozen=True)
class Exporter:
    """Saves and evaluates a trained model.

    Args:
        watch: wraps each call of the user's code that reads.
        finish: completes the model, for example with the final average of its weights. Returns True if the
            model then differs from the one that the ring has evaluated.
        output: where to save the model; None to save it nowhere.
        job_output: the job's output directory, which contains `output`; None for `output` itself.
        salvage: where to save the model if `output` fails; None for a temporary directory.
        room_seconds: how long to wait for room in `output` when it is full.
        step_seconds: the time limit of the user's code while it saves or exports a model without variables.
        further: the formats, beside Keras' own, in which the model is also written.
        verify: starts a process that loads the written model again; None to skip this check.
        source: the text of the module, if the module has no name.
        whole: inside this context, the model also has its rows on servers (trainer/embedding/lookups.py).
        live: inside this context, within `whole`, the model is as trained, even if rows could not be fetched.
        missing: what the saved model lacks because it could not be fetched, in words.
        abandon: ends this process, which hangs in the user's code, once the master knows of the hang.
    """

    model: keras.Model
    module: UserModel
    session: Session
    watch: Watch
    finish: Callable[[], bool]
    output: Path | None
    salvage: Path | None
    room_seconds: float
    step_seconds: float = math.inf
    further: tuple[str, ...] = ()
    verify: Callable[[], Verification] | None = None
    source: str = ""
    whole: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    live: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    missing: Callable[[], str] = str
    job_output: Path | None = None
    abandon: Callable[[], None] = lambda: None

    def __call__(self, worth: Mapping[str, Value] | None = None) -> None:
        """Save the model, report the files, evaluate the model, and report the result.

        Args:
            worth: the loss and metrics of the model, if the ring has evaluated it.

        Raises:
            RingBroken: see `_completed`; nothing was saved or reported.
        """
        verification, unseen = None, ""
        if self.verify is not None and self.output is not None:
            try:  # first, for it takes seconds to begin
                verification = self.verify()
            except (EdlError, OSError) as error:  # no memory, no room for a process
                unseen = format_error(error)
        with contextlib.ExitStack() as kept:
            if verification is not None:
                kept.callback(verification.close)
            self._export(worth, verification, self._completed(kept), unseen)

    def keep(self, step: int) -> None:
        """Save the model as it is at this step, before the ring evaluates it, and report the copy.

        The copy remains if no worker lives to save the evaluated model.
        """
        if self.output is not None:
            with contextlib.ExitStack() as held:
                failed = self._completed(held)
                kept = self._keep()
                place = self._place(kept)
            self.session.say_saved(
                pb.Saved(model=place["model"], note=place["note"], step=step, failed=failed)
            )
            kept.drop_spare()

    def _completed(self, kept: contextlib.ExitStack) -> list[pb.PartFailed]:
        """Complete the model until `kept` is closed, and return the failures of this.

        Raises:
            RingBroken: servers have lost rows of the model. A ring is then formed, which recomputes the
                missing rows before the model is saved.
        """
        try:
            kept.enter_context(self.whole())
        except RingBroken:
            raise
        except FAILURES as error:
            return [_part(SAVING, error)]
        return []

    def _export(
        self,
        worth: Mapping[str, Value] | None,
        verification: Verification | None,
        failed: list[pb.PartFailed],
        unseen: str,
    ) -> None:
        if self.module.callbacks is not None and self.output is not None:
            self._tell_secured(secure(self.model, list(self._directories()), self.session.worker))
        try:
            if self.finish():
                worth = None
        except FAILURES as error:
            failed.append(_part(SAVING, error))
        kept = self._keep()
        place = self._place(kept)
        trouble = [*failed, *_trouble(kept)]
        self.session.say_saved(pb.Saved(model=place["model"], note=place["note"], failed=trouble))
        kept.drop_spare()
        # What may still be moved is handed over when it is where it stays.
        handed = self._hand_over(kept, verification) if kept.trouble is None else None
        metrics = dict(worth or {})
        evaluation = []
        try:
            if worth is None:
                with self.live():
                    metrics = evaluate(self.model, self.module, self.module.reader("test"), self.watch)
        except FAILURES as error:
            evaluation.append(_part(EVALUATION, error))
        kept = self._put_right(kept)
        exports, missing, unasked = handed or self._hand_over(kept, verification)
        unseen, verified = unseen or unasked, frozenset[str]()
        note = ""
        if verification is not None and exports and not missing and not unseen:
            found = verification.result(lambda: self._must_end)
            note = "; ".join(saved_file.by_its_code(f.needs_code) for f in found.values() if f.needs_code)
            missing = [pb.PartFailed(part=VERIFICATION, why=f.wrong) for f in found.values() if f.wrong]
            unseen = next((f.unseen for f in found.values() if f.unseen), "")
            verified = frozenset(name for name, f in found.items() if not (f.wrong or f.unseen))
            for name in verified:
                log.info(
                    f"{exports[name].name} was loaded in a process of its own, and is as the model in memory"
                )
        list_sha256 = self._list(exports, verified)
        place = self._place(kept)
        if note:
            place["note"] = "; ".join(filter(None, [note, self.missing()]))
        if unseen and exports:
            why = self._not_verified([p for name, p in exports.items() if name not in verified], unseen)
            failed.append(pb.PartFailed(part=VERIFICATION, why=why))
        failed += [*_trouble(kept), *missing, *evaluation]
        listed = {name: self._shown(path) for name, path in exports.items()}
        self.session.say(
            finished=pb.Finished(
                metrics=as_numbers(metrics), failed=failed, exports=listed, list_sha256=list_sha256, **place
            )
        )

    def _hand_over(
        self, kept: Kept, verification: Verification | None
    ) -> tuple[dict[str, Path], list[pb.PartFailed], str]:
        """Write the further formats, and have all of them loaded again.

        Returns:
            the files by format, the formats that have failed already, and why they cannot be loaded again
            here.
        """
        if kept.path is None:
            return {}, [], ""
        exports = {"keras": kept.path} if kept.is_whole else {}
        failed, unseen = [], ""
        try:
            part = EXPORTING
            for name in self.further if self.output is not None else ():
                assert self.output is not None
                features = samples.features_of(self.module, self.watch)
                with self._limited(f"the export of the trained model as {name}"):
                    path = formats.put(self.model, name, self.output, features, self.session.worker)
                exports[name] = path
            part = VERIFICATION
            if verification is not None and exports:
                features = samples.features_of(self.module, self.watch)
                with self._limited("the outputs of the trained model for a few records"):
                    sample = samples.of(
                        self.model, features, "" if features is not None else "there are no records"
                    )
                if sample.why:
                    log.info(f"of the saved model, the weights are compared: {sample.why}")
                try:
                    verification.ask(
                        self.model, sample, exports, self.module.name, self.source, self.module.functions
                    )
                except (EdlError, OSError) as error:  # no memory for a copy of the model, or of the records
                    unseen = format_error(error)
        except FAILURES as error:
            failed.append(_part(part, error, f"{name}: " if part == EXPORTING else ""))
        return exports, failed, unseen

    def _not_verified(self, paths: Sequence[Path], why: str) -> str:
        """The warning about files that were not verified."""
        names = " and ".join(path.name for path in paths)
        verb = "is" if len(paths) == 1 else "are"
        return f"{names} {verb} kept, but not verified: {why}; `edl model export {self.output}` does it later"

    def _list(self, exports: dict[str, Path], verified: Collection[str]) -> bytes:
        """Write the list of the exports beside them; returns its SHA-256, empty without room for it."""
        if self.output is None or not exports:
            return b""
        try:
            return catalog.write(self.output, exports, verified)
        except OSError as error:
            log.warning(f"{artifacts.EXPORTS} cannot be written: {error}")
            return b""

    def _keep(self) -> Kept:
        if not self.output:
            return Kept(None)
        return keep(self.model, list(self._directories()), self.session.worker, self._secured)

    @contextlib.contextmanager
    def _secured(self, safe: Path | None) -> Iterator[None]:
        """Inside, the user's code runs to save the model, for a limited time.

        The master knows the file with the variables before.
        """
        self._tell_secured(safe)

        def hung(why: str, stack: str) -> None:
            # Another worker would hang as well. The master adds where the variables are.
            self.session.say(failed=pb.Failed(why=f"saving failed: {why}", traceback=stack, fatal=True))
            self.abandon()

        with self._limited("saving the trained model (get_config(), save_own_variables(), ...)", hung):
            yield

    def _tell_secured(self, safe: Path | None) -> None:
        if safe is not None:
            self.session.say_saved(pb.Saved(variables=self._place(Kept(safe))["model"]))

    def _limited(self, what: str, hung: Hung | None = None) -> contextlib.AbstractContextManager[object]:
        """Limits the time of the user's code where a model is written, too: the larger, the longer."""
        nbytes = sum(math.prod(v.shape) * 8 for v in self.model.variables)  # of no type that is larger
        return self.watch(lambda: what, Limit(self.step_seconds + nbytes / SLOWEST, hung=hung))

    def _directories(self) -> Iterator[Callable[[], Path]]:
        for directory in (self.output, self.salvage):
            if directory is not None:
                yield lambda directory=directory: directory  # type: ignore[misc]
        yield temporary

    def _put_right(self, kept: Kept) -> Kept:
        """Retry to save the model in `output`, if a full disk prevented it.

        If the model is saved elsewhere, retry for a limited time. If it is saved nowhere, retry without
        limit.
        """
        while kept.path is None and may_pass(kept.trouble) and not self._must_end:
            time.sleep(LOOK_SECONDS)  # no event reports free disk space
            kept = self._keep()
        if self.output is None or kept.path is None or not kept.is_whole or kept.trouble is None:
            return kept
        here, there = kept.path, self.output / artifacts.MODEL
        deadline = time.monotonic() + (self.room_seconds if may_pass(kept.trouble) else 0.0)
        while True:
            if _free(self.output) > here.stat().st_size:
                try:
                    write_whole(self.model, there, lambda _, to: _copy(here, to), self.session.worker)
                except OSError as error:
                    kept = Kept(here, error)
                else:
                    here.unlink()
                    with contextlib.suppress(OSError):  # others may lie there
                        temporary().rmdir()
                    return Kept(there)
            if time.monotonic() >= deadline or self._must_end:
                return kept
            time.sleep(LOOK_SECONDS)

    @property
    def _must_end(self) -> bool:
        return self.session.stopped or bool(self.session.ended)

    def _place(self, kept: Kept) -> dict[str, str]:
        if kept.path is None:
            return {"model": "", "note": ""}
        notes = [saved_file.note(kept.path) if kept.is_whole else "", self.missing()]
        note = "; ".join(filter(None, notes))
        return {"model": self._shown(kept.path), "note": note}

    def _shown(self, path: Path) -> str:
        """A file as people find it: within the job's output directory, or the whole path of one elsewhere."""
        inside = self.output is not None and path.parent == self.output
        return str(path.relative_to(self.job_output or path.parent)) if inside else str(path)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _free(directory: Path) -> int:
    """Bytes of room; 0 where that cannot be found out."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


def _trouble(kept: Kept) -> list[pb.PartFailed]:
    return [] if kept.trouble is None else [_part(SAVING, kept.trouble)]


def _part(part: str, error: BaseException, what: str = "") -> pb.PartFailed:
    """An error, for the master. Errors in our own words need no traceback."""
    ours = isinstance(error, EdlError) and not isinstance(error, UserCodeError)
    why = f"{what}{format_error(error)}"
    return pb.PartFailed(part=part, why=why, traceback="" if ours else format_traceback(error))
