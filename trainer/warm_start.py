"""A warm start: a new training that begins with what another one has learned.

`checkpoint.from` is another training's checkpoints, or one of them, or a file that Keras has saved. Of these
`checkpoint.fromState` takes the weights (with moving averages; the optimizer begins anew), or everything. The
job's own records are counted from the first one, whatever those weights have seen.

Only who begins a training reads it, once. What does not fit is refused before, variable by variable; then
nothing is changed.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import h5py
import keras
import numpy as np

from edl.checkpoints import CheckpointError, Manifest, one_of
from edl.config import Config
from edl.errors import ConfigError, EdlError, ModelError
from trainer.described import Described
from trainer.epochs import MEMORY
from trainer.last_words import described as in_words
from trainer.log import log

FILES = (".keras", ".weights.h5")  # as Keras saves models, and weights
IN_KERAS = "model.weights.h5"  # of a .keras file
MOST_NAMED = 5  # variables that do not fit
WORK = {"evaluate": "evaluation", "predict": "prediction"}  # of the modes that do not train
Shape = tuple[int, ...]


class Learner(Protocol):
    """What of a learner is replaced."""

    def described(self) -> list[Described]: ...

    def parts(self) -> list[np.ndarray]: ...

    def prepared(self, parts: list[np.ndarray]) -> Any: ...

    def take_over(self, values: Any) -> None: ...

    def take_metrics(self) -> dict[str, float]: ...

    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class WarmStart:
    """Of a job.

    Args:
        where: `checkpoint.from`.
        everything: optimizer included.
        work: what begins with it: the training.
        tell: takes a line about what has been taken over.
    """

    where: str
    everything: bool
    model: keras.Model
    learner: Learner
    tell: Callable[[str], None]
    work: str = "training"

    def check(self) -> None:
        """Find out whether it is there and fits. Changes nothing, and reads no more than it takes.

        Raises:
            ConfigError: there is nothing of that kind.
            ModelError: it does not fit the model; the text names the variables.
            CheckpointError: it cannot be read.
        """
        if _is_file(self.where):
            with self._file() as path:
                self._compare_file(path)
        else:
            self._compare(one_of(self.where).manifest)

    def begin(self) -> None:
        """Have the learner begin with it. Raises as `check`; nothing is changed then."""
        what = self._take_file() if _is_file(self.where) else self._take_checkpoint()
        if self.everything:
            self.learner.take_metrics()  # what it had counted of an epoch that was not over
        self.tell(f"the {self.work} begins with {what}")

    # --- from a checkpoint

    def _take_checkpoint(self) -> str:
        found = one_of(self.where, log.warning)
        manifest = found.manifest
        self._compare(manifest)
        there = found.read()
        parts = [
            np.frombuffer(there[d.name].data, np.uint8) if self.everything or d.of_model else part
            for d, part in zip(self.learner.described(), self.learner.parts(), strict=True)
        ]
        self.learner.take_over(self.learner.prepared(parts))
        what = "all" if self.everything else "the weights"
        return f"{what} of the checkpoint of step {manifest.step:,} of run {manifest.run} in {self.where}"

    def _compare(self, manifest: Manifest) -> None:
        """
        Raises:
            ModelError: the checkpoint does not fit the model.
        """
        there = {v.name: (v.dtype, v.shape) for v in manifest.variables if v.name != MEMORY}
        ours = [d for d in self.learner.described() if self.everything or d.of_model]
        here = {d.name: (d.dtype, d.shape) for d in ours}
        place = f"checkpoint.from: the checkpoint of step {manifest.step:,} in {self.where}"
        _refuse(place, {n: _kind(*here[n]) for n in here}, {n: _kind(*there[n]) for n in there})
        if self.everything and manifest.model != self.learner.fingerprint():
            raise ModelError(
                f"{place} is of another model: its layers, loss or optimizer differ from those of this one. "
                "With checkpoint.fromState=weights the optimizer begins anew"
            )

    # --- from a file of Keras

    def _take_file(self) -> str:
        before = self.learner.parts()
        with self._file() as path:
            self._compare_file(path)
            try:
                self.model.load_weights(path)
                taken, error = self.learner.parts(), None
            except Exception as raised:  # whatever a damaged file makes Keras and h5py raise
                taken, error = before, raised
        # Keras loads the optimizer, too, or a part of what a damaged file has.
        parts = [
            new if d.of_model else old
            for d, old, new in zip(self.learner.described(), before, taken, strict=True)
        ]
        self.learner.take_over(self.learner.prepared(parts))
        if error is not None:
            raise CheckpointError(f"checkpoint.from: {self.where}: {in_words(error)}") from error
        return f"the weights of {self.where}"

    def _compare_file(self, path: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="edl-") as directory:
            own = Path(directory, "own.weights.h5")
            self.model.save_weights(own)
            _refuse(f"checkpoint.from: {self.where}", _stored(own), _stored(path))

    @contextmanager
    def _file(self) -> Iterator[Path]:
        """It as a file of this machine.

        Raises:
            ConfigError: it is not there.
            CheckpointError: it cannot be read.
        """
        try:
            if "://" not in self.where:
                if not Path(self.where).is_file():
                    raise ConfigError(f"checkpoint.from: {self.where}: no such file on this worker")
                yield Path(self.where)
                return
            import fsspec  # only who has such an address needs it

            with tempfile.TemporaryDirectory(prefix="edl-") as directory:
                path = Path(directory, self.where.rpartition("/")[2])
                with fsspec.open(self.where, "rb") as source, open(path, "wb") as file:
                    shutil.copyfileobj(source, file)
                yield path
        except EdlError:
            raise
        except Exception as error:  # whatever the client of a store says
            raise CheckpointError(f"checkpoint.from: {self.where}: {in_words(error)}") from error


def of_job(
    config: Config, model: keras.Model, learner: Learner, tell: Callable[[str], None]
) -> WarmStart | None:
    """The warm start of a job; None: it begins with what model() returns."""
    checkpoint = config.checkpoint
    if not checkpoint.from_:
        return None
    everything = checkpoint.from_state == "everything"
    return WarmStart(checkpoint.from_, everything, model, learner, tell, WORK.get(config.mode, "training"))


def _is_file(where: str) -> bool:
    return where.endswith(FILES)


def _kind(dtype: str, shape: Shape) -> str:
    return f"{dtype} {list(shape)}"


def _refuse(place: str, here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """
    Raises:
        ModelError: what is here is not there, or is of another kind.
    """
    wrong = [
        f"{name} is {kind} here, {f'and {there[name]} there' if name in there else 'and missing there'}"
        for name, kind in here.items()
        if there.get(name) != kind
    ]
    if wrong:
        more = f"; and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise ModelError(f"{place} does not fit this model: {'; '.join(wrong[:MOST_NAMED])}{more}")


def _stored(path: Path) -> dict[str, str]:
    """The variables in a file of Keras, but the optimizer's: by the names that it has there.

    Raises:
        CheckpointError: it is not such a file.
    """
    found: dict[str, str] = {}

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and not name.startswith("optimizer/"):
            layer = item.parent.attrs.get("name", "")
            told = f"variable {name.rpartition('/')[2]} of layer {layer} ({name})" if layer else name
            found[told] = _kind(str(item.dtype), item.shape)

    try:
        if path.suffix == ".keras":
            with (
                zipfile.ZipFile(path) as archive,
                archive.open(IN_KERAS) as inside,
                h5py.File(inside) as file,
            ):
                file.visititems(note)
        else:
            with h5py.File(path) as file:
                file.visititems(note)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"checkpoint.from: {path.name} is not a file that Keras has saved: {error}"
        ) from error
    return found
