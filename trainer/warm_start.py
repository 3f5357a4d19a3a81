"""A warm start: a new training that begins with what another one has learned.

`checkpoint.from` is another training's checkpoints, or one of them, or a file that Keras has saved. Of these
`checkpoint.fromState` takes the weights (with moving averages; the optimizer begins anew), or everything. The
job's own records are counted from the first one, whatever those weights have seen.

Only who begins a training reads it, once. What does not fit is refused before, variable by variable; then
nothing is changed.

Rows of a job with parameter servers are taken by a job that evaluates or predicts: it has them as variables,
and every worker reads how many there are when it builds the model (`saved_counts`). They are not brought
to servers: a training whose rows are there refuses to begin with anything.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import h5py
import keras
import numpy as np

from edl.checkpoints import Checkpoint, CheckpointError, Manifest, one_of
from edl.config import Config
from edl.errors import ConfigError, EdlError, ModelError
from edl.layers.embedding import Embedding
from trainer.described import Described
from trainer.epochs import MEMORY
from trainer.last_words import described as in_words
from trainer.log import log
from trainer.roles import Table
from trainer.saved_rows import counted, counted_in_file, tables, weights_in

FILES = (".keras", ".weights.h5")  # as Keras saves models, and weights
MOST_NAMED = 5  # variables that do not fit
WORK = {"evaluate": "evaluation", "predict": "prediction"}  # of the modes that do not train
Shape = tuple[int, ...]


class Learner(Protocol):
    """What of a learner is replaced."""

    @property
    def tables(self) -> tuple[Table, ...]: ...

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
        self._refuse_rows_on_servers()
        if _is_file(self.where):
            with local_file(self.where) as path:
                self._compare_file(path)
        else:
            self._compare(one_of(self.where))

    def begin(self) -> None:
        """Have the learner begin with it. Raises as `check`; nothing is changed then."""
        self._refuse_rows_on_servers()
        what = self._take_file() if _is_file(self.where) else self._take_checkpoint()
        if self.everything:
            self.learner.take_metrics()  # what it had counted of an epoch that was not over
        self.tell(f"the {self.work} begins with {what}")

    def _refuse_rows_on_servers(self) -> None:
        """
        Raises:
            ModelError: the model has some, which would begin anew, beside weights that are trained.
        """
        if names := ", ".join(repr(table.name) for table in self.learner.tables):
            raise ModelError(
                f"checkpoint.from: {self.where}: the rows of {names} are on parameter servers, to which none "
                "can be brought from there yet: they would begin anew, beside weights that were trained with "
                "others. Leave checkpoint.from out; to go on with a job, resume it or give it its "
                "checkpoint.dir"
            )

    # --- from a checkpoint

    def _take_checkpoint(self) -> str:
        found = one_of(self.where, log.warning)
        manifest, layers = found.manifest, self._with_rows(found)
        self._compare(found)
        there = found.read()
        values = {name: np.frombuffer(tensor.data, np.uint8) for name, tensor in there.items()}
        values.update(self._rows(found, layers))
        parts = [
            values[d.name] if self.everything or d.of_model else part
            for d, part in zip(self.learner.described(), self.learner.parts(), strict=True)
        ]
        self.learner.take_over(self.learner.prepared(parts))
        what = "all" if self.everything else "the weights"
        return f"{what} of the checkpoint of step {manifest.step:,} of run {manifest.run} in {self.where}"

    def _with_rows(self, checkpoint: Checkpoint) -> list[Embedding]:
        """The layers whose rows are in its servers' parts."""
        names = counted(checkpoint)
        return [
            layer
            for layer in self.model._flatten_layers()
            if isinstance(layer, Embedding) and layer.ids is not None and layer.name in names
        ]

    def _rows(self, checkpoint: Checkpoint, layers: Sequence[Embedding]) -> dict[str, np.ndarray]:
        """The values of these layers' variables, uint8 [bytes], by the names of the variables.

        Raises:
            ModelError: other rows are there than the model was built for.
        """
        there, found = tables(checkpoint) if layers else {}, dict[str, np.ndarray]()
        for layer in layers:
            table, ours = there[layer.name], (layer.vocabulary, layer.dim)
            if table.rows.shape != ours:
                raise ModelError(
                    f"{_place(checkpoint.manifest, self.where)} has {list(table.rows.shape)} rows (how many, "
                    f"of what length) of layer {layer.name!r}, and the model was built for {list(ours)}. If "
                    "checkpoints are still being written there, name one of them: DIR/step-..."
                )
            order = np.argsort(table.ids)
            assert layer.ids is not None and layer.embeddings is not None
            for variable, value in ((layer.ids, table.ids), (layer.embeddings, table.rows)):
                found[variable.path] = np.ascontiguousarray(value[order]).reshape(-1).view(np.uint8)
        return found

    def _compare(self, checkpoint: Checkpoint) -> None:
        """
        Raises:
            ModelError: the checkpoint does not fit the model.
        """
        manifest, layers = checkpoint.manifest, self._with_rows(checkpoint)
        elsewhere = {v.path for layer in layers for v in (layer.ids, layer.embeddings) if v is not None}
        there = {v.name: (v.dtype, v.shape) for v in manifest.variables if v.name != MEMORY}
        ours = [d for d in self.learner.described() if self.everything or d.of_model]
        here = {d.name: (d.dtype, d.shape) for d in ours if d.name not in elsewhere}
        place = _place(manifest, self.where)
        _refuse(place, {n: _kind(*here[n]) for n in here}, {n: _kind(*there[n]) for n in there})
        # With rows as variables it is made in another way than where they are on servers.
        if self.everything and not layers and manifest.model != self.learner.fingerprint():
            raise ModelError(
                f"{place} is of another model: its layers, loss or optimizer differ from those of this one. "
                "With checkpoint.fromState=weights the optimizer begins anew"
            )

    # --- from a file of Keras

    def _take_file(self) -> str:
        before = self.learner.parts()
        with local_file(self.where) as path:
            self._compare_file(path)
            try:
                with warnings.catch_warnings():  # of the optimizer's part, which is not wanted anyway
                    warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
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
def local_file(where: str) -> Iterator[Path]:
    """What is there, as a file of this machine.

    Raises:
        ConfigError: it is not there.
        CheckpointError: it cannot be read.
    """
    try:
        if "://" not in where:
            if not Path(where).is_file():
                raise ConfigError(f"checkpoint.from: {where}: no such file on this worker")
            yield Path(where)
            return
        import fsspec  # only who has such an address needs it

        with tempfile.TemporaryDirectory(prefix="edl-") as directory:
            path = Path(directory, where.rpartition("/")[2])
            with fsspec.open(where, "rb") as source, open(path, "wb") as file:
                shutil.copyfileobj(source, file)
            yield path
    except EdlError:
        raise
    except Exception as error:  # whatever the client of a store says
        raise CheckpointError(f"checkpoint.from: {where}: {in_words(error)}") from error


def saved_counts(where: str) -> dict[str, int]:
    """Of each layer whose rows were on parameter servers, how many `checkpoint.from` has: to be known when
    the model is built.

    Raises:
        ConfigError: it is not there.
        CheckpointError: it cannot be read.
    """
    if not where:
        return {}
    if not _is_file(where):
        return counted(one_of(where))
    with local_file(where) as path:
        try:
            return counted_in_file(path)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint.from: {error}") from error


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


def _place(manifest: Manifest, where: str) -> str:
    return f"checkpoint.from: the checkpoint of step {manifest.step:,} in {where}"


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
        with weights_in(path) as file:
            file.visititems(note)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"checkpoint.from: {path.name} is not a file that Keras has saved: {error}"
        ) from error
    return found
