"""The end of a job: save the trained model, then evaluate it on what was held out.

Promise: nothing that goes wrong here loses the model. The trained variables are written before any of the
user's code runs (callbacks, get_config(), the evaluation), and are deleted once the whole model is saved. The
model is saved before it is evaluated. Where it cannot be saved in the output directory, it is saved
elsewhere, and where it cannot be saved whole at all, its weights are. The master is told what has failed, and
where the rest is kept.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import keras
import numpy as np

from edl.contract import artifacts
from edl.contract.evaluation import FINAL
from edl.contract.proto import edl_pb2 as pb
from edl.contract.ranges import Range
from edl.data import Reader
from edl.errors import EdlError, UserCodeError
from edl.full_disk import PASSING
from trainer import saved_file
from trainer.exports import catalog, formats, samples
from trainer.exports.verification import Verification
from trainer.last_words import described, traced
from trainer.log import log
from trainer.metric_values import Value, as_numbers, values_of
from trainer.records import Records
from trainer.ring.base import RingBroken
from trainer.session.state import Session
from trainer.user_model import UserModel
from trainer.watchdog import Hung, Limit, Watch

EVALUATION_BATCH = 256
# The parts of the end, as the master knows them.
SAVING, EXPORTING, VERIFICATION, EVALUATION = "saving", "export", "verification", "evaluation"
SLOWEST = 10_000_000  # bytes of a model that are written in a second where all else is slow
LOOK_SECONDS = 0.5  # between two looks whether there is room now
FAILURES = (Exception, SystemExit)  # what the user's code may raise


# --- saving


def _save_weights(model: keras.Model, path: Path) -> None:
    """As Keras does: of a model whose own train_step() calls only what it is made of, too."""
    if not model.built and model.variables:
        model.built = True  # its layers are, and Keras asks for no more
    model.save_weights(path)


def _save_variables(model: keras.Model, path: Path) -> None:
    """Without Keras' help: each variable by its path, for when all else fails."""
    paths = [f"{number}:{v.path}" for number, v in enumerate(model.variables)]
    arrays = {p: np.asarray(v) for p, v in zip(paths, model.variables, strict=True)}
    np.savez(path, **arrays)  # type: ignore[arg-type]


# How a model can be written beside its variables, the best way first. Both run the user's code.
FORMS: tuple[tuple[str, Callable[[keras.Model, Path], None]], ...] = (
    (artifacts.MODEL, saved_file.save),
    (artifacts.WEIGHTS, _save_weights),
)


@dataclass(frozen=True)
class Kept:
    """What was saved, and why it was not saved better.

    Args:
        path: the file; None: nothing could be written anywhere.
        trouble: why the whole model is not in the first directory; None: it is.
        spare: a file with the variables, which `path` makes superfluous; None: there is none.
    """

    path: Path | None
    trouble: BaseException | None = None
    spare: Path | None = None

    def drop_spare(self) -> None:
        """The master knows of `path`."""
        if self.spare is not None:
            with contextlib.suppress(OSError):
                self.spare.unlink(missing_ok=True)

    @property
    def is_whole(self) -> bool:
        return self.path is not None and self.path.name == artifacts.MODEL


def secure(model: keras.Model, directories: Sequence[Callable[[], Path]], worker: int) -> Path | None:
    """Write the model's variables into the first directory that takes them. Runs none of the user's code.

    Args:
        directories, worker: see `keep`.
    """
    for directory in directories:
        with contextlib.suppress(*FAILURES):
            return _write(model, directory() / artifacts.VARIABLES, _save_variables, worker)
    return None


def keep(
    model: keras.Model,
    directories: Sequence[Callable[[], Path]],
    worker: int,
    secured: Callable[[Path | None], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Kept:
    """Save the model in the first form and the first directory that work: whole anywhere before its weights.

    Args:
        directories: in order of preference. Each is called when it is tried, so that none is made in vain.
        worker: the number of this worker, for the names of unfinished files.
        secured: goes around what runs the user's code, and takes the file with the variables.
    """
    trouble: BaseException | None = None
    safe = secure(model, directories, worker)
    with secured(safe):
        for name, write in FORMS:
            for directory in directories:
                try:
                    kept = _write(model, directory() / name, write, worker)
                except FAILURES as error:
                    trouble = trouble or disk_error(error) or error
                    if not (may_pass(disk_error(error)) and safe and safe.parent == directory()):
                        continue
                    # There is no room for both. The model has been asked for its configuration by now.
                    safe.unlink(missing_ok=True)
                    safe = None
                    try:
                        kept, trouble = _write(model, directory() / name, write, worker), None
                    except FAILURES:
                        safe = secure(model, directories, worker)
                        continue
                return Kept(kept, trouble, safe)
    return Kept(safe, trouble)


def _write(model: keras.Model, path: Path, write: Callable[[keras.Model, Path], None], worker: int) -> Path:
    """Whole or not at all: a reader sees the old file, none, or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".*.{path.name}"):  # of one who was lost while it wrote
        left.unlink(missing_ok=True)
    unfinished = path.with_name(f".{worker}.{path.name}")
    try:
        write(model, unfinished)
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return path


def disk_error(error: BaseException) -> OSError | None:
    """What a disk has said, if that is behind the error: what writes a file wraps it in errors of its own."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno is not None):
        cause = cause.__cause__ or cause.__context__
    return cause


def may_pass(error: BaseException | None) -> bool:
    """Whether it is that of a disk that is full: there may be room later."""
    return isinstance(error, OSError) and error.errno in PASSING


@functools.cache
def temporary() -> Path:
    """A directory of this process, made when it is needed."""
    return Path(tempfile.mkdtemp(prefix="edl-model-"))


# --- evaluation


class _Batches(keras.utils.PyDataset):
    """A reader's records as Keras wants to be given them.

    Args:
        goes_on: is called with each batch.
    """

    def __init__(self, source: Records, batches: Sequence[Range], goes_on: Callable[[], None]):
        super().__init__()
        self._source, self._batches, self._goes_on = source, batches, goes_on

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> tuple[object, ...]:
        self._goes_on()
        batch = self._source.plain(*self._batches[index])
        # tf.data, through which Keras takes them, knows no lists, and has no type for labels that are None.
        batch = replace(batch, x=keras.tree.lists_to_tuples(batch.x), y=keras.tree.lists_to_tuples(batch.y))
        if batch.weights is not None:
            return batch.x, batch.y, batch.weights
        return (batch.x,) if batch.y is None else (batch.x, batch.y)


@contextlib.contextmanager
def _own_step_given_as_by_fit(model: keras.Model) -> Iterator[None]:
    """Inside, a `test_step` of the model's own is given what `fit` gives it: features alone, if there are no
    labels."""
    if type(model).test_step is keras.Model.test_step:
        yield
        return
    own, unpacked, packed = (
        model.test_step, keras.utils.unpack_x_y_sample_weight, keras.utils.pack_x_y_sample_weight
    )  # fmt: skip
    model.test_step = lambda data: own(packed(*unpacked(data)))
    model.test_function = None  # which has the step as it was
    try:
        yield
    finally:
        del model.test_step
        model.test_function = None


def evaluate(
    model: keras.Model,
    zoo: UserModel,
    reader: Reader | None,
    watch: Watch,
    batches: Sequence[Range] | None = None,
) -> dict[str, Value]:
    """The compiled loss and metrics over the held-out records; empty when there are none.

    Args:
        reader: of data("test").
        watch: goes around each call of the user's code that reads.
        batches: of records, by their index; None: all of them.
    """
    size = 0 if reader is None else len(reader)
    if reader is None or size == 0:
        return {}
    source = Records(reader, zoo.feed_of(FINAL), zoo.name, watch)
    if batches is None:
        starts = range(0, size, EVALUATION_BATCH)
        batches = [(start, min(start + EVALUATION_BATCH, size)) for start in starts]
    with (
        watch(lambda: "the evaluation of a batch of data('test') by the worker that saves the model") as call,
        _own_step_given_as_by_fit(model),
    ):
        results = model.evaluate(_Batches(source, batches, call.goes_on), verbose=0, return_dict=True)
    return values_of(results)


# --- both


@dataclass(frozen=True)
class Exporter:
    """Saves and evaluates a model that is trained.

    Args:
        watch: goes around each call of the user's code that reads.
        finish: what the model still needs, such as the final average of its weights. True: it is another one
            then than the ring has evaluated.
        output: where the model is wanted; None: nowhere.
        job_output: the job's output directory, in which `output` is; None: `output` itself.
        salvage: where to save it when that fails; None: in a temporary directory.
        room_seconds: how long to wait for room in `output` when it is full.
        step_seconds: that the user's code may take where it saves or exports a model without variables.
        further: the formats beside Keras' own, in which the model is written too.
        verify: begins a process that loads again what was written; None: that is not wanted.
        source: the text of the module, where it has no name.
        whole: within it, the model has what else is not in this process (trainer/lookups.py).
        live: within that, it is as it was trained, whatever could not be had.
        missing: what could not, in words.
        abandon: ends this process, which hangs in the user's code, once the master has heard of it.
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
        """Save, say so, evaluate, say so.

        Args:
            worth: the loss and metrics of the model, where the ring has evaluated it.

        Raises:
            RingBroken: see `_completed`; nothing was saved or said.
        """
        verification, unseen = None, ""
        if self.verify is not None and self.output is not None:
            try:  # first, for it takes seconds to begin
                verification = self.verify()
            except (EdlError, OSError) as error:  # no memory, no room for a process
                unseen = described(error)
        with contextlib.ExitStack() as kept:
            if verification is not None:
                kept.callback(verification.close)
            self._export(worth, verification, self._completed(kept), unseen)

    def keep(self, step: int) -> None:
        """Save the model as it is at this step, before the ring evaluates it, and say so: a copy, in case
        that nobody lives to hand the model over."""
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
        """Until `kept` is closed, the model has all that it is made of; what has failed of that.

        Raises:
            RingBroken: servers have lost rows that it is made of. A ring is formed, which makes what is
                missing: then it is saved.
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
        """Write the further formats and have all loaded again: what there is by the names of the formats,
        what has failed of it already, and why it cannot be loaded again here."""
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
                    verification.ask(self.model, sample, exports, self.module.name, self.source)
                except (EdlError, OSError) as error:  # no memory for a copy of the model, or of the records
                    unseen = described(error)
        except FAILURES as error:
            failed.append(_part(part, error, f"{name}: " if part == EXPORTING else ""))
        return exports, failed, unseen

    def _not_verified(self, paths: Sequence[Path], why: str) -> str:
        """What one has to know of files that nobody has looked at."""
        names = " and ".join(path.name for path in paths)
        verb = "is" if len(paths) == 1 else "are"
        return f"{names} {verb} kept, but not verified: {why}; `edl export {self.output}` does it later"

    def _list(self, exports: dict[str, Path], verified: Collection[str]) -> bytes:
        """Write the list of the exports beside them; returns its SHA-256, empty if there is no room for it."""
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
        """Inside, the user's code is run to save the model: for a limited time, and after the master knows
        the file with the variables."""
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
        """What is not where it ought to be for want of room gets there when there is some.

        A model that lies elsewhere waits a while for that; one that lies nowhere, as long as it takes.
        """
        while kept.path is None and may_pass(kept.trouble) and not self._must_end:
            time.sleep(LOOK_SECONDS)  # nobody tells when a disk has room
            kept = self._keep()
        if self.output is None or kept.path is None or not kept.is_whole or kept.trouble is None:
            return kept
        here, there = kept.path, self.output / artifacts.MODEL
        deadline = time.monotonic() + (self.room_seconds if may_pass(kept.trouble) else 0.0)
        while True:
            if _free(self.output) > here.stat().st_size:
                try:
                    _write(self.model, there, lambda _, to: _copy(here, to), self.session.worker)
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
    why = f"{what}{described(error)}"
    return pb.PartFailed(part=part, why=why, traceback="" if ours else traced(error))
