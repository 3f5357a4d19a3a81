# SPDX-License-Identifier: Apache-2.0
"""What was exported is loaded again in a fresh process, and compared: `trainer.exports`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import edl
from edl.contract import artifacts
from edl.errors import ConfigError, EdlError, UserCodeError
from edl.trainer.export import exporter, formats, samples
from edl.trainer.export.preflight import run_preflight
from edl.trainer.export.verification import Found, Verification, refuse_without
from edl.trainer.model.user_model import UserModel
from edl.trainer.runtime.watchdog import unwatched
from tests.process.conftest import ROOT
from tests.process.jobs.test_export import noting

pytestmark = pytest.mark.process
SECONDS = 90.0
NO_SAMPLE: Any = None  # for a process that does not look at it
RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def several_inputs() -> tuple[keras.Model, Any]:
    """Numbers and a row of tokens, by name; two outputs, by name."""
    a, tokens = keras.Input((3,), name="a"), keras.Input((5,), dtype="int32", name="tokens")
    row = keras.layers.LSTM(4)(keras.layers.Embedding(20, 4)(tokens))
    both = keras.layers.Concatenate()([a, row])
    outputs = {"z": keras.layers.Dense(2)(both), "b": keras.layers.Dense(1, activation="relu")(both)}
    features = {"tokens": RNG.integers(0, 20, (6, 5)), "a": numbers(6, 3)}
    return keras.Model({"a": a, "tokens": tokens}, outputs), features


class OwnClass(keras.Model):
    """It says nothing of its inputs, a list."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.one, self.other = keras.layers.Dense(2), keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.one(inputs[0]) * self.other(inputs[1])


def own_class() -> tuple[keras.Model, Any]:
    model = OwnClass()
    features = [numbers(6, 3), numbers(6, 4)]
    model(features)
    return model, features


def dense() -> tuple[keras.Model, Any]:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]), numbers(6, 3)


@pytest.fixture
def verification() -> Iterator[Verification]:
    fresh = begun()
    yield fresh
    fresh.close()


def begun() -> Verification:
    fresh = Verification(SECONDS)
    fresh.begin()
    return fresh


def written(model: keras.Model, features: Any, folder: Path) -> dict[str, Path]:
    """In all formats."""
    keras_file = folder / artifacts.MODEL
    model.save(keras_file)
    return {
        "keras": keras_file,
        **{name: put(model, name, folder, features) for name in formats.KERAS_NAMES},
    }


def put(model: keras.Model, name: str, folder: Path, features: Any) -> Path:
    return formats.put(
        folder / artifacts.FORMATS[name], partial(formats.write, model, name, sample=features), 0
    )


def own_module() -> UserModel:
    """This file, whose functions are below."""
    return UserModel(__file__, model, data, None)


@pytest.mark.parametrize("made", [several_inputs, own_class])
def test_each_format_gives_what_the_model_in_memory_gives(
    made: Any, tmp_path: Path, verification: Verification
) -> None:
    model, features = made()
    exports = written(model, features, tmp_path)
    verification.ask(samples.of(model, features), exports, module=own_module())
    found = verification.result()
    assert {name: f.wrong for name, f in found.items()} == dict.fromkeys(artifacts.FORMATS, "")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(artifacts.FORMATS.values())


def test_what_differs_or_is_torn_is_found(tmp_path: Path, verification: Verification) -> None:
    model, features = dense()
    exports = written(model, features, tmp_path)
    whole = exports["keras"].read_bytes()
    exports["keras"].write_bytes(whole[: len(whole) // 2])
    weights = exports["savedmodel"] / "variables" / "variables.data-00000-of-00001"
    weights.write_bytes(weights.read_bytes()[:-8])
    sample = samples.of(model, features)
    model.layers[-1].kernel.assign_add(np.ones((3, 2)))
    verification.ask(samples.of(model, features), exports)
    found = verification.result()
    assert found["keras"].wrong.startswith("model.keras cannot be loaded and run: ")
    assert found["savedmodel"].wrong.startswith("model.savedmodel cannot be loaded and run: ")
    assert "model.onnx gives other outputs than the model in memory: they differ by" in found["onnx"].wrong
    assert samples.difference(sample.outputs, sample.outputs) == 0


class NoConfig(keras.layers.Layer):
    """Keras cannot make it again."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def call(self, x: Any) -> Any:
        return x * self.factor

    def get_config(self) -> dict[str, Any]:
        return {}


def model() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), NoConfig(2.0), keras.layers.Dense(2)])


def data(split: str) -> None:
    return None


def test_a_model_that_only_its_own_code_can_build_is_loaded_by_that(
    tmp_path: Path, verification: Verification
) -> None:
    built, features = model(), numbers(6, 3)
    path = tmp_path / artifacts.MODEL
    built.save(path)
    verification.ask(samples.of(built, features), {"keras": path}, module=own_module())
    found = verification.result()["keras"]
    assert found.wrong == ""
    assert found.needs_code.startswith("model.keras cannot be loaded and run: TypeError: ")


def test_random_outputs_are_not_compared_but_the_weights_are(
    tmp_path: Path, verification: Verification
) -> None:
    noisy = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Lambda(noise)])
    sample = samples.of(noisy, numbers(6, 3))
    assert sample.why == "the model gives other outputs each time it is called"
    path = tmp_path / artifacts.MODEL
    noisy.save(path)
    noisy.layers[0].kernel.assign_add(np.ones((3, 2)))
    verification.ask(samples.of(noisy, numbers(6, 3)), {"keras": path}, module=own_module())
    assert verification.result()["keras"].wrong == "model.keras holds other weights than the model in memory"


def noise(x: Any) -> Any:
    import keras

    return x + keras.random.normal(keras.ops.shape(x))


def failing(how: str, monkeypatch: pytest.MonkeyPatch) -> Verification:
    """A verification whose process fails like this."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    service = f"tests.support.jobs.failing_verifiers:{how}"
    monkeypatch.setattr("edl.trainer.export.verification.VERIFIER", service)
    return begun()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("Killed", "the process that loads it was killed (SIGKILL), perhaps because memory ran out"),
        ("Crashing", "the process that loads it has crashed (SIGSEGV)"),
        ("Hanging", "the process that loads it has not answered for 0.2 s (elastic.startupTimeoutSeconds)"),
        ("TooLarge", "the process that loads it has failed: MemoryError: cannot allocate 5 GiB"),
    ],
)
def test_who_dies_or_hangs_while_it_loads_a_file_has_not_found_anything_wrong_with_it(
    how: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, path = failing(how, monkeypatch), tmp_path / "model.keras"
    path.touch()
    fresh._seconds = 0.2 if how == "Hanging" else SECONDS
    fresh.ask(NO_SAMPLE, {"keras": path})
    assert fresh.result() == {"keras": Found(unseen=why)}


def test_a_large_file_is_given_more_time_unless_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, path = failing("Hanging", monkeypatch), tmp_path / "model.keras"
    with open(path, "wb") as file:
        file.truncate(20_000_000_000)  # a hole: nothing of it lies on the disk
    fresh._seconds, looks = 0.2, list[float]()
    fresh.ask(NO_SAMPLE, {"keras": path})

    def must_end() -> bool:
        looks.append(time.monotonic())
        return looks[-1] > looks[0] + 1

    assert "the job ends before" in fresh.result(must_end)["keras"].unseen


def test_a_model_that_could_not_be_looked_at_is_kept_and_the_job_does_not_say_that_it_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory, for example: another process may load it later."""
    made, said = dense()[0], list[Any]()
    module = UserModel("mine", model, lambda split: edl.arrays(numbers(6, 3), numbers(6, 2)), None)
    made.compile(loss="mse")
    for limit, why in (
        ("1800000000", "to load the model again takes about 320 MiB"),
        ("max", "was killed (SIGKILL)"),
    ):
        set_memory_limit(tmp_path, limit, monkeypatch)
        verification, session = failing("Killed", monkeypatch), noting(said)
        exporter.Exporter(
            made, module, session, unwatched, lambda: False, tmp_path, None, 0.0, verification=verification
        )()
        finished = said[-1].finished
        (failed,) = finished.failed
        assert failed.part == exporter.VERIFICATION
        assert failed.why.startswith("model.keras is kept, but not verified: ")
        assert why in failed.why
        assert f"`edl model export {tmp_path}`" in failed.why
        assert finished.model == "model.keras"
        (listed,) = json.loads((tmp_path / artifacts.EXPORTS).read_text())["exports"]
        assert listed["verified"] is False


def test_the_environment_of_the_job_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EDL_TOKEN", "HOROVOD_RANK", "MINE"):
        monkeypatch.setenv(name, "x")
    fresh = Verification(SECONDS, threads=1)
    fresh.begin()
    assert fresh._server is not None and fresh._server._process is not None
    environment, text = Path(f"/proc/{fresh._server._process.pid}/environ"), ""
    # Popen returns when exec closes its files, which is just before the kernel sets the environment.
    while not text:
        text = environment.read_text()
    entries = text.split("\0")
    fresh.close()
    assert {"MINE=x", "CUDA_VISIBLE_DEVICES=-1", "TF_NUM_INTRAOP_THREADS=1"} <= set(entries)
    assert not {"EDL_TOKEN=x", "HOROVOD_RANK=x"} & set(entries)


def set_memory_limit(folder: Path, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with this limit that uses 1.5 GB, besides what the kernel can reclaim."""
    for name, text in {"max": limit, "current": "1800000000", "stat": "inactive_file 300000000"}.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr("edl.trainer.export.verification.CGROUP", folder)


def test_the_memory_limit_of_a_container_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory_limit(tmp_path, "2000000000", monkeypatch)
    refuse_without(400_000_000)
    with pytest.raises(EdlError, match="about 572 MiB, and the container's memory limit leaves 476 MiB"):
        refuse_without(600_000_000)
    set_memory_limit(tmp_path, "max", monkeypatch)
    refuse_without(600_000_000)
    monkeypatch.setattr("edl.trainer.export.verification.CGROUP", tmp_path / "none")
    refuse_without(600_000_000)


class EagerOnly(keras.Model):
    """It cannot be traced."""

    def call(self, x: Any) -> Any:
        if not tf.executing_eagerly():
            raise RuntimeError("not in a graph")
        return x


@pytest.mark.parametrize("name", formats.KERAS_NAMES)
def test_what_cannot_be_exported_is_refused_before_the_training(name: str) -> None:
    made, features = EagerOnly(), numbers(6, 3)
    made(features)
    made.compile(run_eagerly=True)
    module = UserModel("mine", model, data, None)
    why = f"cannot be written as {name}, tried out before the first step: .*EagerOnly"
    with pytest.raises(UserCodeError, match=why):
        run_preflight(made, module, unwatched, True, lambda warning: None, True, (name,), features)


def test_a_format_whose_packages_are_missing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    formats.refuse_missing(["savedmodel", "onnx"])
    monkeypatch.setitem(formats.PACKAGES, "onnx", ("onnx", "no_such_package"))
    with pytest.raises(ConfigError, match=r"export.formats: onnx needs packages .*: no_such_package"):
        formats.refuse_missing(["savedmodel", "onnx"])


SERVE = """
import sys, json, tensorflow as tf
loaded = tf.saved_model.load(sys.argv[1])
given = json.loads(sys.argv[2])
serve = loaded.signatures["serving_default"]
types = serve.structured_input_signature[1]
found = serve(**{k: tf.constant(v, types[k].dtype) for k, v in given.items()})
print(json.dumps({k: v.numpy().tolist() for k, v in found.items()}))
"""


def test_the_serving_signature_needs_tensorflow_alone(tmp_path: Path) -> None:
    """The model was never called before it is written, as one whose train_step() calls only its layers."""
    made, features = OwnClass(), [numbers(6, 3), numbers(6, 4)]
    made.one.build((None, 3))
    made.other.build((None, 4))
    path = put(made, "savedmodel", tmp_path, features)
    given = json.dumps({f"input_{nth}": array.tolist() for nth, array in enumerate(features)})
    done = subprocess.run(
        [sys.executable, "-I", "-c", SERVE, str(path), given], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    np.testing.assert_allclose(found["output_0"], made(features), rtol=1e-4, atol=1e-5)
