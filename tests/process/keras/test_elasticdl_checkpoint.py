# SPDX-License-Identifier: Apache-2.0
"""A training that begins with a checkpoint of ElasticDL: files as its servers wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import keras
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from tensorflow.core.framework import tensor_pb2  # noqa: F401  ElasticDL's messages refer to it

from edl.checkpoints import CheckpointError
from edl.cli.local.job_values import check_checkpoints
from edl.config import parse, values
from edl.errors import ConfigError, ModelError
from edl.trainer.checkpoint.source import saved_counts
from edl.trainer.checkpoint.warm_start import WarmStart
from edl.trainer.step.learner import KerasLearner
from tests.process.keras.models import plain
from tests.process.keras.rings import Case, Meeting, learner_of
from tests.process.keras.test_warm_rows import TABLE, on_servers
from tests.support.checkpoints.s3 import serving

pytestmark = pytest.mark.process

USERS, ITEMS, DIM = 10, 6, 3
FIELD = descriptor_pb2.FieldDescriptorProto


def elasticdl_model() -> Any:
    """The class of ElasticDL's message Model, made from its definition: TensorProto fields, and two maps."""
    file = descriptor_pb2.FileDescriptorProto(name="elasticdl.proto", package="proto", syntax="proto3")
    file.dependency.append("tensorflow/core/framework/tensor.proto")

    def field(message: Any, name: str, number: int, kind: int, of: str = "", repeated: bool = False) -> None:
        label = FIELD.LABEL_REPEATED if repeated else FIELD.LABEL_OPTIONAL
        message.field.add(name=name, number=number, type=kind, type_name=of or None, label=label)

    rows = file.message_type.add(name="IndexedSlicesProto")
    field(rows, "concat_tensors", 1, FIELD.TYPE_MESSAGE, ".tensorflow.TensorProto")
    field(rows, "ids", 2, FIELD.TYPE_INT64, repeated=True)
    model = file.message_type.add(name="Model")
    field(model, "version", 1, FIELD.TYPE_INT32)
    for name, number, of in (
        ("dense_parameters", 3, ".tensorflow.TensorProto"),
        ("embedding_tables", 4, ".proto.IndexedSlicesProto"),
    ):
        entry = model.nested_type.add(name="".join(word.title() for word in name.split("_")) + "Entry")
        entry.options.map_entry = True
        field(entry, "key", 1, FIELD.TYPE_STRING)
        field(entry, "value", 2, FIELD.TYPE_MESSAGE, of)
        field(model, name, number, FIELD.TYPE_MESSAGE, f".proto.Model.{entry.name}", repeated=True)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("proto.Model"))


MODEL = elasticdl_model()


def write(
    folder: Path,
    version: int,
    dense: Mapping[str, np.ndarray],
    tables: Mapping[str, Mapping[int, np.ndarray]],
    servers: int = 2,
) -> Path:
    """Write a checkpoint: each weight on one server, each row on the server of its id."""
    where = folder / f"version-{version}"
    where.mkdir(parents=True)
    for server in range(servers):
        model = MODEL(version=version)
        for number, (name, value) in enumerate(dense.items()):
            if number % servers == server:
                model.dense_parameters[name].CopyFrom(tf.make_tensor_proto(value))
        for name, rows in tables.items():
            own = {i: row for i, row in rows.items() if i % servers == server}
            values = np.array([*own.values()], np.float32).reshape(len(own), len(next(iter(rows.values()))))
            model.embedding_tables[name].concat_tensors.CopyFrom(tf.make_tensor_proto(values))
            model.embedding_tables[name].ids.extend(own)
        (where / f"variables-{server}-of-{servers}.ckpt").write_bytes(model.SerializeToString())
    return where


def build() -> keras.Model:
    keras.backend.clear_session()  # names as in a process of its own
    inputs = keras.Input((4,))  # two ids, and others
    features = [
        keras.layers.Flatten()(keras.layers.Embedding(size, DIM)(keras.ops.cast(keras.ops.abs(ids), "int32")))
        for ids, size in ((inputs[:, 0:1], USERS), (inputs[:, 1:2], ITEMS))
    ]
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4)(keras.layers.concatenate(features)))
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


@pytest.fixture
def learner() -> KerasLearner:
    return learner_of(Case(build, plain), Meeting())


def weights(of: KerasLearner) -> dict[str, np.ndarray]:
    return {v.path: v.numpy() for v in of.model.variables}


def warm(of: KerasLearner, where: Path | str, everything: bool = False, told: Any = print) -> WarmStart:
    return WarmStart(str(where), everything, of.model, of, told)


def dense(of: KerasLearner, first: int) -> dict[str, np.ndarray]:
    """New values for the weights of the model, with the names that Keras 2 gave them later in a process."""
    random = np.random.default_rng(5)
    names = {"dense": f"dense_{first}", "dense_1": f"dense_{first + 1}"}
    found = {}
    for path, value in weights(of).items():
        layer, _, rest = path.partition("/")
        if not rest.startswith(("embeddings", "moving_")):
            found[f"{names.get(layer, layer)}/{rest}:0"] = random.normal(size=value.shape).astype(np.float32)
    return found


def test_weights_and_rows_of_two_servers_are_taken_by_names_and_ids(
    learner: KerasLearner, tmp_path: Path
) -> None:
    stored = dense(learner, first=9)
    users = {i: np.full(DIM, 100.0 + i, np.float32) for i in (0, 3, 9)}
    items = {i: np.full(DIM, 200.0 + i, np.float32) for i in range(ITEMS)}
    tables = {"embedding_7": users, "embedding_8": items}
    write(tmp_path, 30, stored, tables)
    write(tmp_path, 200, {name: value + 1 for name, value in stored.items()}, tables)
    (write(tmp_path, 300, stored, tables) / "variables-1-of-2.ckpt").unlink()  # still being written
    before, told = weights(learner), list[str]()
    start = warm(learner, tmp_path, told=told.append)
    start.check()
    assert all(np.array_equal(value, before[name]) for name, value in weights(learner).items())
    start.begin()
    assert told == [f"the training begins with the weights of version 200 of ElasticDL in {tmp_path}"]
    after = weights(learner)
    for name in ("kernel", "bias"):
        np.testing.assert_array_equal(after[f"dense/{name}"], stored[f"dense_9/{name}:0"] + 1)
        np.testing.assert_array_equal(after[f"dense_1/{name}"], stored[f"dense_10/{name}:0"] + 1)
    moving = "batch_normalization/moving_variance"
    np.testing.assert_array_equal(after[moving], before[moving])  # ElasticDL did not store it
    ours = before["embedding/embeddings"]
    expected = [users.get(i, ours[i]) for i in range(USERS)]
    np.testing.assert_array_equal(after["embedding/embeddings"], expected)
    np.testing.assert_array_equal(after["embedding_1/embeddings"], [*items.values()])


def test_a_checkpoint_that_was_copied_to_an_object_store_is_read_there(
    learner: KerasLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = dense(learner, first=9)
    tables = {name: {2: np.full(DIM, 7.0, np.float32)} for name in ("embedding_7", "embedding_8")}
    written = write(tmp_path, 200, stored, tables)
    with serving() as account:
        for name, text in account.variables.items():
            monkeypatch.setenv(name, text)
        url = f"{account.url}/deepfm"
        typed = parse(values.load([], [f"model.module=digits,initFrom.path={url}"], [], []))
        store, told = fsspec.filesystem("s3"), list[str]()
        for file in written.iterdir():
            store.pipe_file(f"{url}/{written.name}/{file.name}", file.read_bytes())
        check_checkpoints(typed, None)
        assert saved_counts(url) == {}, "no layer learns its rows from it"
        start = warm(learner, url, told=told.append)
        start.check()
        start.begin()
        assert told == [f"the training begins with the weights of version 200 of ElasticDL in {url}"]
        np.testing.assert_array_equal(weights(learner)["dense/kernel"], stored["dense_9/kernel:0"])
        assert weights(learner)["embedding_1/embeddings"][2].tolist() == [7.0] * DIM

        part = f"{url}/version-200/variables-1-of-2.ckpt"
        store.pipe_file(part, store.cat_file(part)[:-3])
        with pytest.raises(CheckpointError, match=f"{part}: damaged checkpoint of ElasticDL"):
            start.begin()
        store.rm_file(part)
        with pytest.raises(ConfigError, match=rf"initFrom\.path: {url}: .*: variables-1-of-2\.ckpt is miss"):
            check_checkpoints(typed, None)


def test_rows_of_a_layer_on_servers_are_sent_to_the_servers(tmp_path: Path) -> None:
    learner, start, servers = on_servers(tmp_path)
    rows = {i: np.array([i, -i], np.float32) for i in (4, 7, 1 << 40)}
    kernel = np.array([[3.0], [5.0]], np.float32)
    write(tmp_path, 8, {"dense_1/kernel:0": kernel, "dense_1/bias:0": np.ones(1, np.float32)}, {TABLE: rows})
    start.check()
    assert not servers.starts
    start.begin()
    ids, values = servers.starts[0].rows[0]
    assert {int(i): [*row] for i, row in zip(ids, values, strict=True)} == {i: [i, -i] for i in rows}
    np.testing.assert_array_equal(learner.model.get_layer("dense").kernel, kernel)
    write(tmp_path, 9, {"dense_1/kernel:0": kernel, "dense_1/bias:0": np.ones(1, np.float32)}, {})
    with pytest.raises(ModelError, match="the rows of 'counts' are of length 2 here, and missing there"):
        start.check()


def test_a_job_is_refused_before_its_start_if_a_file_is_missing(tmp_path: Path) -> None:
    where = write(tmp_path, 1, {"dense/bias:0": np.ones(1, np.float32)}, {})
    typed = parse(values.load([], [f"model.module=digits,initFrom.path={tmp_path}"], [], []))
    check_checkpoints(typed, None)
    (where / "variables-0-of-2.ckpt").unlink()
    with pytest.raises(ConfigError, match=r"initFrom\.path: .*: variables-0-of-2\.ckpt is missing"):
        check_checkpoints(typed, None)


def test_what_does_not_fit_or_is_missing_is_refused_by_name(learner: KerasLearner, tmp_path: Path) -> None:
    stored = dense(learner, first=0)
    tables = {f"embedding{end}": {0: np.zeros(DIM)} for end in ("", "_1")}
    stored["dense_0/kernel:0"] = np.zeros((5, 4), np.float32)
    whole = write(tmp_path / "a", 1, stored, tables)
    with pytest.raises(ModelError, match=r"dense/kernel is \[6, 4\] here, and \[5, 4\] there"):
        warm(learner, whole).check()
    with pytest.raises(ModelError, match=r"no state of an optimizer: set initFrom.state=weights"):
        warm(learner, whole, everything=True).check()
    del stored["dense_0/kernel:0"]
    with pytest.raises(ModelError, match=r"dense/kernel is \[6, 4\] here, and missing there"):
        warm(learner, write(tmp_path / "b", 1, stored, tables)).check()
    far = write(tmp_path / "c", 1, dense(learner, first=0), tables | {"embedding_1": {ITEMS: np.zeros(DIM)}})
    with pytest.raises(ModelError, match=r"embedding_1/embeddings is \[6, 3\] here, and rows 6 to 6 of"):
        warm(learner, far).check()
    (whole / "variables-0-of-2.ckpt").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete .*: variables-0-of-2.ckpt is missing"):
        warm(learner, whole).check()
    (far / "variables-1-of-2.ckpt").write_bytes(b"\x1a\x7f damaged")
    with pytest.raises(CheckpointError, match=r"variables-1-of-2.ckpt: damaged checkpoint of ElasticDL"):
        warm(learner, far).check()
