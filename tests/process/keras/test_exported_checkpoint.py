# SPDX-License-Identifier: Apache-2.0
"""`edl model export` of a checkpoint: the model that the module builds, with what is in it."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from edl import config
from edl.checkpoints import Store, Tensor
from edl.config import values
from edl.trainer.agreement.epochs import MEMORY
from edl.trainer.model import user_model
from edl.trainer.programs.export_checkpoint import Request, export
from edl.trainer.records.records import Records
from edl.trainer.start.build_learner import Alone, learner_of
from edl.trainer.step.learner import KerasLearner
from tests.support.checkpoints.checkpoints import write

pytestmark = pytest.mark.process
SOURCE = """
import edl, keras, numpy as np

def model():
    keras.backend.clear_session()  # names as in a process of its own
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(use_ema=True), "mse")
    return model

def callbacks():
    return [keras.callbacks.EarlyStopping("loss")]

def data(split):
    return edl.arrays(np.ones((20, 3)), np.ones((20, 2)))
"""


def test_what_callbacks_remember_is_in_a_checkpoint_and_no_part_of_the_model(tmp_path: Path) -> None:
    given = values.merge(
        values.defaults(), {"model": {"source": SOURCE}, "export": {"verify": False, "formats": []}}
    )
    parsed = config.parse(given)
    assert parsed.export.verify is False
    module = user_model.load("", SOURCE)
    reader = module.reader("train")
    assert reader is not None
    batches = [Records(reader, None, "").batch_at(range(5))]
    learner = learner_of(module.model(), batches, Alone(), parsed.training, print)
    assert isinstance(learner, KerasLearner)
    average = learner.model.optimizer._model_variables_moving_average[0]
    average.assign(np.full((3, 2), 7.0))
    tensors = {
        d.name: Tensor(d.dtype, d.shape, part.data)
        for d, part in zip(learner.variable_specs(), learner.parts(), strict=True)
    }
    tensors[MEMORY] = Tensor.of(np.zeros(9, np.uint8))
    write(Store.open(str(tmp_path / "c")), 7, tensors=tensors, model=learner.fingerprint())
    request = Request(given, "", str(tmp_path / "c"), None, "keras", str(tmp_path / "m.keras"))
    assert "the model of step 7" in export(request)
    exported = keras.models.load_model(tmp_path / "m.keras")
    assert (np.asarray(exported.layers[0].kernel) == 7.0).all(), "the averages, as at a training's end"


BY_ITS_CODE = """
import edl, keras, numpy as np

class Doubled(keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return 2 * self.dense(x)

    def get_config(self):
        return {}

def model():
    model = keras.Sequential([keras.Input((3,)), Doubled(2)])
    model.compile("adam", "mse")
    return model

def data(split):
    return edl.arrays(np.ones((20, 3)), np.ones((20, 2)))
"""


def test_a_trained_model_that_only_its_own_code_can_build_is_exported(tmp_path: Path) -> None:
    """As Keras' vision transformer, whose layers do not say all of how they were made."""
    given = values.merge(
        values.defaults(), {"model": {"source": BY_ITS_CODE}, "export": {"verify": False, "formats": []}}
    )
    trained, path = user_model.load("", BY_ITS_CODE).model(), tmp_path / "model.keras"
    trained.save(path)
    request = Request(given, str(path), "", None, "keras", str(tmp_path / "m.keras"))
    assert "the trained model as keras" in export(request)
    again = user_model.load("", BY_ITS_CODE).model()
    again.load_weights(tmp_path / "m.keras")
    for ours, theirs in zip(again.weights, trained.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
