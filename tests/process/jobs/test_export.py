# SPDX-License-Identifier: Apache-2.0
"""How a trained model is kept when it cannot be saved as it should: `edl.trainer.export.exporter`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import edl
from edl.contract import artifacts
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.evaluation import local_evaluation
from edl.trainer.export import exporter, model_saving
from edl.trainer.model.user_model import UserModel
from edl.trainer.ring.base import RingBroken
from edl.trainer.runtime.watchdog import Watchdog, unwatched
from edl.trainer.session.state import Session
from tests.process.jobs.test_saved_file import dense

pytestmark = pytest.mark.process


class Odd(keras.layers.Layer):
    """It cannot say how it was made."""

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(3,), initializer="ones", name="w")

    def call(self, x: Any) -> Any:
        return x * self.w

    def get_config(self) -> dict[str, Any]:
        raise RuntimeError("no config")


SECONDS = 20.0


def noting(said: list[pb.FromWorker]) -> Session:
    """A session whose master notes at once what is said."""

    def send(message: pb.FromWorker) -> None:
        said.append(message)
        session.hear(pb.ToWorker(ack=pb.Ack()))

    session = Session(0, send, threading.Event())
    return session


def model(*layers: keras.layers.Layer) -> keras.Model:
    made = keras.Sequential([keras.Input((3,)), *layers, dense()])
    made.compile(optimizer="sgd", loss="mse")
    made.optimizer.build(made.trainable_variables)
    return made


def kept_in(trained: keras.Model, *directories: Path) -> model_saving.Kept:
    return model_saving.keep(trained, directories, 0, model_saving.secure(trained, directories, 0))


def test_the_whole_model_elsewhere_is_better_than_its_weights_here(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.write_text("a file where a directory should be")
    kept = kept_in(model(), here, there)
    assert (kept.path, type(kept.trouble)) == (there / artifacts.MODEL, FileExistsError)
    kept.drop_spare()
    assert [p.name for p in there.iterdir()] == [artifacts.MODEL]


def test_what_cannot_be_serialised_keeps_its_variables(tmp_path: Path) -> None:
    trained = model(Odd())
    trained.layers[0].w.assign([1.0, 2.0, 3.0])
    kept = kept_in(trained, tmp_path)
    assert (kept.path, str(kept.trouble)) == (tmp_path / artifacts.VARIABLES, "no config")
    kept.drop_spare()
    assert [p.name for p in tmp_path.iterdir()] == [artifacts.VARIABLES], "nothing else is left"
    with np.load(tmp_path / artifacts.VARIABLES) as arrays:
        saved = {path.partition(":")[2]: array for path, array in arrays.items()}
    assert saved[trained.layers[0].w.path].tolist() == [1.0, 2.0, 3.0]


def test_features_in_a_list_are_evaluated_as_fit_takes_them() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    inputs = [keras.Input((3,)), keras.Input((3,))]
    two = keras.Model(inputs, keras.layers.Subtract()(inputs))
    two.compile(loss="mse")
    module = UserModel(
        "mine", lambda: two, lambda split: edl.arrays(x, x + 1, x), lambda r: ([r[0], r[1]], r[2])
    )
    found = local_evaluation.evaluate(two, module, module.reader("validation"), unwatched)
    assert found == {"loss": pytest.approx(float(np.mean((x + 1) ** 2)))}


def test_a_disk_that_is_full_is_told_from_what_an_archive_makes_of_it() -> None:
    full = OSError(28, "No space left on device")

    def write() -> None:
        try:
            raise full
        finally:
            raise ValueError("Can't close the ZIP file while there is an open writing handle on it")

    with pytest.raises(ValueError, match="ZIP") as told:
        write()
    assert model_saving.disk_error(told.value) is full
    assert model_saving.disk_error(ValueError("no config")) is None


def test_a_model_whose_rows_servers_have_lost_is_not_saved_without_them(tmp_path: Path) -> None:
    said: list[pb.FromWorker] = []
    session = noting(said)
    module = UserModel("mine", model, lambda split: None, None)

    @contextlib.contextmanager
    def whole() -> Iterator[None]:
        raise RingBroken("parameter server 0 has lost its log and rows")
        yield

    saving = exporter.Exporter(
        model(), module, session, unwatched, lambda: False, tmp_path, None, 0.0, whole=whole
    )
    for save in (saving, lambda: saving.keep(3)):
        with pytest.raises(RingBroken, match="has lost its log"):
            save()
    assert not said and not list(tmp_path.iterdir()), "a ring rolls back with the servers, and saves it then"


def test_what_cannot_be_finished_is_saved_all_the_same_and_told(tmp_path: Path) -> None:
    said: list[pb.FromWorker] = []
    session = noting(said)
    module = UserModel("mine", model, lambda split: None, None)

    def finish() -> bool:
        raise RuntimeError("no average")

    exporter.Exporter(model(), module, session, unwatched, finish, tmp_path, None, 0.0)()
    secured, saved, finished = said[0].saved, said[1].saved, said[2].finished
    assert (secured.variables, saved.model) == (artifacts.VARIABLES, artifacts.MODEL)
    assert finished.model == artifacts.MODEL
    assert {p.name for p in tmp_path.iterdir()} == {artifacts.MODEL, artifacts.EXPORTS}, "no spare is left"
    assert [(f.part, f.why) for f in finished.failed] == [("saving", "RuntimeError: no average")]
    assert keras.models.load_model(tmp_path / artifacts.MODEL).count_params() == 4


def test_a_model_that_finds_no_room_is_saved_again_when_there_is_some(tmp_path: Path) -> None:
    """The output has no room at first; another directory has."""
    trained, said, attempts = model(), list[pb.FromWorker](), list[int]()

    class NoRoomYet(keras.layers.Dense):
        def save_own_variables(self, store: Any) -> None:
            attempts.append(len(attempts))
            if len(attempts) == 1:
                raise OSError(28, "No space left on device")
            super().save_own_variables(store)

    trained.layers[-1].__class__ = NoRoomYet
    module = UserModel("mine", model, lambda split: None, None)
    output, salvage = tmp_path / "output", tmp_path / "salvage"
    exporter.Exporter(
        trained, module, noting(said), unwatched, lambda: False, output, salvage, room_seconds=SECONDS
    )()
    (first,), finished = [m.saved for m in said if m.saved.model], said[-1].finished
    assert (first.model, [f.part for f in first.failed]) == (str(salvage / artifacts.MODEL), ["saving"])
    assert (finished.model, list(finished.failed)) == (artifacts.MODEL, [])
    assert {p.name for p in output.iterdir()} == {artifacts.MODEL, artifacts.EXPORTS}, "no spare is left"
    assert not list(salvage.iterdir())


def test_the_variables_are_written_before_the_users_code_runs_which_is_ended_when_it_hangs(
    tmp_path: Path,
) -> None:
    """A callback sees the file already; get_config() hangs, and the file holds the trained values."""
    trained, said = model(), list[pb.FromWorker]()
    kernel = trained.layers[-1].kernel
    kernel.assign(np.full(kernel.shape, 7.0))
    file, abandoned = tmp_path / artifacts.VARIABLES, threading.Event()
    found: list[Any] = []

    class Hangs(keras.layers.Dense):
        def get_config(self) -> dict[str, Any]:
            assert abandoned.wait(SECONDS)
            raise OSError("the process has ended")

    trained.layers[-1].__class__ = Hangs

    def sevens() -> bool:
        with np.load(file) as arrays:
            return any(np.all(array == 7) for path, array in arrays.items() if path.endswith("kernel"))

    def abandon() -> None:
        found.extend([sevens(), *said])
        abandoned.set()

    def finish() -> bool:
        assert sevens()
        return False

    def hung(why: str, stack: str) -> None:
        raise AssertionError(why)

    session = noting(said)
    module = UserModel("mine", model, lambda split: None, None, callbacks=list)
    exporter.Exporter(
        trained,
        module,
        session,
        Watchdog(SECONDS, hung).watch,
        finish,
        tmp_path,
        None,
        0.0,
        step_seconds=0.2,
        abandon=abandon,
    )()
    written, *told = found
    assert written
    assert {message.saved.variables for message in told[:-1]} == {artifacts.VARIABLES}
    failed = told[-1].failed
    assert failed.fatal, "another worker would hang as well"
    assert failed.why.startswith("saving failed: saving the trained model (get_config(), ")
    assert failed.why.endswith(" has not returned for 0.2 s (elastic.stepTimeoutSeconds)")
    assert "in get_config" in failed.traceback
