# SPDX-License-Identifier: Apache-2.0
"""The end of a job: save the trained model, then evaluate it on the held-out records.

Promise: no failure here loses the model. The trained variables are written before any of the user's code runs
(callbacks, get_config(), the evaluation), and are deleted once the whole model is saved. The model is saved
before it is evaluated. If the output directory is full, a different one takes the model, and saving it in the
output directory is tried once more. If it cannot be saved whole at all, the file with the variables stays. A
report to the master names the failure, and the files that were saved.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import keras

from edl.contract import artifacts
from edl.contract.evaluation import VALIDATION
from edl.contract.proto import edl_pb2 as pb
from edl.errors import EdlError, UserCodeError
from edl.trainer.agreement.metric_values import Value, as_numbers
from edl.trainer.evaluation.local_evaluation import evaluate
from edl.trainer.export import formats, samples, saved_file
from edl.trainer.export.model_saving import Kept, keep, may_pass, secure
from edl.trainer.export.saved_file import FAILURES
from edl.trainer.export.verification import Found, Verification
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
        room_seconds: how long to wait for room in a full `output` before the second attempt.
        step_seconds: the time limit of the user's code while it saves or exports a model without variables.
        further: the formats, beside Keras' own, in which the model is also written.
        verification: the process that loads the written model again; None to skip this check.
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
    verification: Verification | None = None
    source: str = ""
    whole: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    live: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    missing: Callable[[], str] = str
    job_output: Path | None = None
    abandon: Callable[[], None] = lambda: None

    def __call__(self, final_metrics: Mapping[str, Value] | None = None) -> None:
        """Save the model, report the files, evaluate the model, and report the result.

        Args:
            final_metrics: the loss and metrics of the model, if the ring has evaluated it.

        Raises:
            RingBroken: servers have lost rows of the model; nothing was saved or reported. A ring is then
                formed, which recomputes the missing rows before the model is saved.
        """
        failed: list[pb.PartFailed] = []
        with contextlib.ExitStack() as held:
            if self.verification is not None:
                held.callback(self.verification.close)
                self.verification.begin()  # first, for it takes seconds
            with _noted(failed, SAVING, but=(RingBroken,)):
                held.enter_context(self.whole())
            if self.module.callbacks is not None and self.output is not None:
                self._secure()
            with _noted(failed, SAVING):
                if self.finish():
                    final_metrics = None
            kept = self._keep()
            self._report_saved(kept, [*failed, *_trouble(kept)])
            kept = self._retry(kept)
            failed += _trouble(kept)
            exports = self._export(kept, failed)
            metrics = dict(final_metrics) if final_metrics is not None else self._evaluate(failed)
            found = self._verified(exports, failed)
            self._report_finished(kept, exports, found, metrics, failed)
            kept.drop_spare()

    def keep(self, step: int) -> None:
        """Save the model as it is at this step, before the ring evaluates it, and report the copy.

        The copy remains if no worker lives to save the evaluated model.

        Raises:
            RingBroken: as for the final model.
        """
        if self.output is None:
            return
        failed: list[pb.PartFailed] = []
        with contextlib.ExitStack() as held:
            with _noted(failed, SAVING, but=(RingBroken,)):
                held.enter_context(self.whole())
            self._report_saved(self._keep(), failed, step)

    def _evaluate(self, failed: list[pb.PartFailed]) -> dict[str, Value]:
        """The loss and metrics of the model."""
        with _noted(failed, EVALUATION), self.live():
            *_, (split, reader) = self.module.held_out().items() or [(VALIDATION, None)]
            return evaluate(self.model, self.module, reader, self.watch, split=split)
        return {}

    def _export(self, kept: Kept, failed: list[pb.PartFailed]) -> dict[str, Path]:
        """Write the further formats, have all files loaded again, and return the files by format."""
        exports = {"keras": kept.path} if kept.path is not None and kept.is_whole else {}
        if self.output is None or kept.path is None or not (self.further or (self.verification and exports)):
            return exports
        with _noted(failed, VERIFICATION):
            features = samples.features_of(self.module, self.watch)
            for name in self.further:
                with (
                    _noted(failed, EXPORTING, f"{name}: "),
                    self._limited(f"the export of the trained model as {name}"),
                ):
                    write = partial(formats.write, self.model, name, sample=features)
                    path = self.output / artifacts.FORMATS[name]
                    exports[name] = formats.put(path, write, self.session.worker)
            if self.verification is not None and exports:
                with self._limited("the outputs of the trained model for a few records"):
                    sample = samples.of(self.model, features)
                if sample.why:
                    log.info(f"of the saved model, the weights are compared: {sample.why}")
                self.verification.ask(sample, exports, self.module, self.source)
        return exports

    def _verified(self, exports: Mapping[str, Path], failed: list[pb.PartFailed]) -> dict[str, Found]:
        """Wait for the result of the verification of these files."""
        if self.verification is None:
            return {}
        found = self.verification.result(lambda: self._must_end)
        failed += [pb.PartFailed(part=VERIFICATION, why=f.wrong) for f in found.values() if f.wrong]
        for name in (name for name, f in found.items() if f.verified):
            log.info(
                f"{exports[name].name} was loaded in a process of its own, and is as the model in memory"
            )
        if unseen := {exports[name].name: f.unseen for name, f in found.items() if f.unseen}:
            kept = f"{' and '.join(unseen)} {'is' if len(unseen) == 1 else 'are'} kept, but not verified"
            later = f"`edl model export {self.output}` does it later"
            why = f"{kept}: {next(iter(unseen.values()))}; {later}"
            failed.append(pb.PartFailed(part=VERIFICATION, why=why))
        return found

    def _report_finished(
        self,
        kept: Kept,
        exports: Mapping[str, Path],
        found: Mapping[str, Found],
        metrics: Mapping[str, Value],
        failed: Sequence[pb.PartFailed],
    ) -> None:
        """Write the list of the exports beside them, and report the end of the job."""
        place, list_sha256 = self._place(kept), b""
        if self.output is not None and exports:
            verified = [name for name, f in found.items() if f.verified]
            try:
                list_sha256 = formats.write_list(self.output, exports, verified)
            except OSError as error:
                log.warning(f"{artifacts.EXPORTS} cannot be written: {error}")
        if notes := [saved_file.by_its_code(f.needs_code) for f in found.values() if f.needs_code]:
            place["note"] = "; ".join(filter(None, [*notes, self.missing()]))
        self.session.say_finished(
            pb.Finished(
                metrics=as_numbers(metrics),
                failed=failed,
                exports={name: self._shown(path) for name, path in exports.items()},
                list_sha256=list_sha256,
                **place,
            )
        )

    def _report_saved(self, kept: Kept, failed: Sequence[pb.PartFailed], step: int = 0) -> None:
        self.session.say_saved(pb.Saved(step=step, failed=failed, **self._place(kept)))
        kept.drop_spare()

    def _secure(self) -> Path | None:
        """Write the model's variables before any of the user's code runs, and report the file."""
        safe = secure(self.model, self._directories, self.session.worker)
        if safe is not None:
            self.session.say_saved(pb.Saved(variables=self._shown(safe)))
        return safe

    def _keep(self, safe: Path | None = None) -> Kept:
        """Save the model; `safe` is a file that has it, or its variables, and is superfluous then."""
        if not self.output:
            return Kept(None)
        safe = safe or self._secure()
        with self._limited("saving the trained model (get_config(), save_own_variables(), ...)", self._hung):
            classes = self.module.labels.classes or ()
            return keep(self.model, self._directories, self.session.worker, safe, classes)

    def _hung(self, why: str, stack: str) -> None:
        # Another worker would hang as well. The master adds where the variables are.
        self.session.say(failed=pb.Failed(why=f"saving failed: {why}", traceback=stack, fatal=True))
        self.abandon()

    def _limited(self, what: str, hung: Hung | None = None) -> contextlib.AbstractContextManager[object]:
        """Limits the time of the user's code where a model is written, too: the larger, the longer."""
        nbytes = sum(math.prod(v.shape) * 8 for v in self.model.variables)  # of no type that is larger
        return self.watch(lambda: what, Limit(self.step_seconds + nbytes / SLOWEST, hung=hung))

    @property
    def _directories(self) -> list[Path]:
        return [directory for directory in (self.output, self.salvage) if directory is not None]

    def _retry(self, kept: Kept) -> Kept:
        """Save the model once more if the output directory was full, as soon as it has room.

        After `room_seconds` without room, the model stays where it is.
        """
        if self.output is None or not may_pass(kept.trouble):
            return kept
        deadline = time.monotonic() + self.room_seconds
        while not self._has_room(kept.path):
            if self._must_end or time.monotonic() >= deadline:
                return kept
            time.sleep(LOOK_SECONDS)  # no event reports free disk space
        again = self._keep(kept.path)
        return kept if again.trouble is not None else again

    def _has_room(self, file: Path | None) -> bool:
        """Whether the output directory has room for a copy of the file."""
        assert self.output is not None
        try:
            return shutil.disk_usage(self.output).free > (file.stat().st_size if file is not None else 0)
        except OSError:
            return False

    @property
    def _must_end(self) -> bool:
        return self.session.stopped or bool(self.session.ended)

    def _place(self, kept: Kept) -> dict[str, str]:
        if kept.path is None:
            return {"model": "", "note": ""}
        notes = [saved_file.note(kept.path) if kept.is_whole else "", self.missing()]
        return {"model": self._shown(kept.path), "note": "; ".join(filter(None, notes))}

    def _shown(self, path: Path) -> str:
        """A file as people find it: within the job's output directory, or the whole path of one elsewhere."""
        inside = self.output is not None and path.parent == self.output
        return str(path.relative_to(self.job_output or path.parent)) if inside else str(path)


def _trouble(kept: Kept) -> list[pb.PartFailed]:
    return [] if kept.trouble is None else [_failure(SAVING, kept.trouble)]


@contextlib.contextmanager
def _noted(
    failed: list[pb.PartFailed], part: str, what: str = "", but: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Inside, a failure of the user's code ends the block, and is added to `failed`.

    Args:
        part: the part of the end that fails then.
        what: the beginning of the reason.
        but: errors that are raised nevertheless.
    """
    try:
        yield
    except but:
        raise
    except FAILURES as error:
        failed.append(_failure(part, error, what))


def _failure(part: str, error: BaseException, what: str = "") -> pb.PartFailed:
    """An error, for the master. Errors in our own words need no traceback."""
    ours = isinstance(error, EdlError) and not isinstance(error, UserCodeError)
    why = f"{what}{format_error(error)}"
    return pb.PartFailed(part=part, why=why, traceback="" if ours else format_traceback(error))
