# SPDX-License-Identifier: Apache-2.0
"""Modules of ElasticDL's contract, trained by a ring of two, and by ElasticDL's own loop in one process."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from edl import config
from edl.compat.elasticdl import stand_ins
from edl.config import values
from edl.contract import artifacts
from edl.errors import ModelError
from edl.trainer.export import formats, fresh, samples, saved_file
from edl.trainer.model import user_model
from edl.trainer.records.records import Records
from edl.trainer.step.learner import KerasLearner
from tests.process.keras.rings import Meeting, ring_step

ZOO = Path(__file__).parents[2] / "models" / "elasticdl" / "model_zoo"
COUNT, BATCH, STEPS = 30, 10, 3


def feature(value: Any) -> tf.train.Feature:
    if isinstance(value[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=value))
    if isinstance(value[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=value))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=value))


def examples(path: Path, example: Callable[[random.Random], dict[str, Any]]) -> Path:
    rng = random.Random(1)
    with tf.io.TFRecordWriter(str(path)) as file:
        for _ in range(COUNT):
            features = {name: feature(value) for name, value in example(rng).items()}
            file.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    return path


def image(rng: random.Random) -> dict[str, Any]:
    return {"image": [rng.random() * 255 for _ in range(16)], "label": [rng.randrange(3)]}


def person(rng: random.Random) -> dict[str, Any]:
    texts = {key: [rng.choice([b"Private", b"State-gov"])] for key in ("workclass", "native-country")}
    return {**texts, "age": [rng.random()], "hours-per-week": [rng.random()], "label": [rng.randrange(2)]}


def clicks(path: Path) -> Path:
    rng = random.Random(1)
    lines = [[*(rng.randrange(20) for _ in range(5)), rng.randrange(2)] for _ in range(COUNT)]
    path.write_text("".join(f"{','.join(map(str, line))}\n" for line in lines))
    return path


def data(name: str, folder: Path) -> dict[str, str]:
    if name == "deepfm":
        return {"data.train": str(clicks(folder / "clicks.txt")), "data.options.shards": "4"}
    example = image if name == "images" else person
    return {"data.train": str(examples(folder / "a.tfrecord", example))}


def loaded(path: Path, sets: dict[str, str]) -> user_model.UserModel:
    merged = values.load(
        [],
        [
            f"model.module={path}",
            "data.validationFraction=0",
            *(f"{key}={value}" for key, value in sets.items()),
        ],
    )
    return user_model.of_job(config.parse(merged))


def by_elasticdl(
    module: Any, model: keras.Model, batches: list[Any], rate: Callable[[int], float] | None
) -> None:
    """ElasticDL's allreduce_trainer with one worker; a loss of several values is averaged, as edl does."""
    optimizer = module["optimizer"]()
    for version, (features, labels) in enumerate(batches):
        if rate is not None:
            optimizer.learning_rate = rate(version)
        with tf.GradientTape() as tape:
            outputs = model(features, training=True)
            loss = tf.reduce_mean(module["loss"](labels, outputs))
            if model.losses:
                loss += tf.math.add_n(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def loaded_again(learner: KerasLearner, found: user_model.UserModel, records: Records, at: Path) -> None:
    """Check that the model gives the same outputs when its files are loaded, if need be by its own code."""
    sample = samples.of(learner.model, records.batch_at(range(5)).x)
    assert sample.outputs, sample.why
    module = {"name": found.name, "source": "", "functions": found.functions}
    for form, name in artifacts.FORMATS.items():
        if form != "onnx":
            formats.write(learner.model, form, at / name, sample.features)
            assert fresh.Verifier().look(form, at / name, sample, module).verified


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")  # a model that is only called
@pytest.mark.parametrize("name", ["images", "census/census", "census/sequential", "deepfm"])
def test_a_module_is_trained_as_by_elasticdl(name: str, tmp_path: Path) -> None:
    found = loaded(ZOO / f"{name}.py", data(name, tmp_path))
    reader = found.reader("train")
    assert reader is not None
    assert len(reader) == COUNT
    records = Records(reader, found.feed_of("train"), found.name)
    keras.utils.set_random_seed(3)
    meeting, sample = Meeting(), records.batch_at(range(5))
    warnings: list[str] = []
    others = [records.batch_at([n]) for n in range(3)]
    learner = KerasLearner(found.model(), sample, others, reduce=meeting.reduce, warn=warnings.append)
    assert not any("mixes" in line for line in warnings), warnings

    assert isinstance(found.names, dict)
    with stand_ins.importable():
        own = found.names["custom_model"]()
        raw = reader.read(0, COUNT)
        columns = raw if isinstance(raw, tuple) else tf.constant(list(raw), tf.string)
        in_order = tf.data.Dataset.from_tensor_slices(columns)
        metadata = getattr(reader, "metadata", None)
        pairs = [*found.names["feed"](in_order, "evaluation", metadata).batch(BATCH)]
        given = [(next(iter(f.values())) if len(f) == 1 else f, labels) for f, labels in pairs]
        own(given[0][0])
    own.set_weights(learner.model.get_weights())
    rate = (lambda version: 0.5 if version < 2 else 0.2) if name == "deepfm" else None
    by_elasticdl(found.names, own, given, rate)

    for step in range(STEPS):
        start = step * BATCH
        parts = [records.batch_at(range(start, start + 4)), records.batch_at(range(start + 4, start + BATCH))]
        ring_step(learner, meeting, parts, step)
    for mine, theirs in zip(learner.model.get_weights(), own.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    shown = learner.model.get_metrics_result()
    accuracy = shown["logits_accuracy" if name == "deepfm" else "accuracy"]
    assert 0 < float(accuracy) <= 1
    loaded_again(learner, found, records, tmp_path)
    if name == "deepfm":
        imports = (
            "import edl.compat.elasticdl.operations, edl.layers.embedding; import the module that registers"
        )
        assert f": {imports} ApplyMask, or pass custom_objects" in saved_file.note(tmp_path / artifacts.MODEL)
    assert "elasticdl" not in sys.modules, (
        "the stand-ins are importable only while a module of the zoo is loaded"
    )


def test_predictions_go_to_the_processor_and_need_no_label(tmp_path: Path) -> None:
    found = loaded(ZOO / "deepfm.py", data("deepfm", tmp_path))
    assert found.write is not None
    outputs = {"probs": np.array([[0.25], [0.5]], np.float32)}
    found.write(outputs, np.arange(2))
    assert found.names["SEEN"] == [0.25, 0.5]
    images = loaded(
        ZOO / "images.py", {"data.predict": str(examples(tmp_path / "i.tfrecord", image)), "mode": "predict"}
    )
    feed, reader = images.feed_of("predict"), images.reader("predict")
    assert feed is not None
    assert reader is not None
    features = feed(reader.read(0, 4))
    assert features["image"].shape == (4, 4, 4)


REFUSED = {
    "from elasticdl.python.common.tensor_utils import x": "tensor_utils: edl has no stand-in for this module",
    "from elasticdl.python.common.constants import JobType": "JobType: edl has no stand-in for this name",
    "from deepctr.models import WDL": "imports deepctr: it works with Keras 2 only",
    "def feed(): ...\nfeed = None": "the module has no feed, which ElasticDL's contract needs",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_run_is_refused_with_the_name_of_what_is_missing(text: str, tmp_path: Path) -> None:
    names = ("custom_model", "loss", "optimizer", "feed", "eval_metrics_fn")
    functions = "".join(f"def {name}(): ...\n" for name in names)
    (tmp_path / "refused.py").write_text(functions + text)
    with pytest.raises(ModelError, match=REFUSED[text]):
        user_model.load(str(tmp_path / "refused.py"))
    assert "elasticdl" not in sys.modules
