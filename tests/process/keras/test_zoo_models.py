# SPDX-License-Identifier: Apache-2.0
"""The zoo's models of ids, as Keras alone trains them: they build, and they learn."""

import importlib

import keras
import numpy as np
import pytest

from edl.zoo.datasets import clicks


@pytest.mark.parametrize("name", ["deepfm", "wide_deep", "dcn_v2"])
def test_a_model_of_clicks_learns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_CLICKS_RECORDS", "4000")
    monkeypatch.setenv("EDL_CLICKS_IDS", "1000")
    monkeypatch.setenv("EDL_CLICKS_BUCKETS", "20000")
    module = importlib.import_module(f"edl.zoo.{name}")
    keras.utils.set_random_seed(1)
    model = module.model()
    x, y = module.feed(module.data("train").read(0, 4000))
    before = model.evaluate(x, y, batch_size=1000, verbose=0, return_dict=True)
    model.fit(x, y, batch_size=100, epochs=2, verbose=0)
    x, y = module.feed(module.data("validation").read(0, 666))
    after = model.evaluate(x, y, batch_size=1000, verbose=0, return_dict=True)
    assert after["loss"] < before["loss"]
    assert after["auc"] > 0.6, "of records that it has not seen"


def test_digits_are_learned_from_ids() -> None:
    from edl.zoo import digits_ids

    keras.utils.set_random_seed(1)
    model = digits_ids.model()
    train, test = digits_ids.data("train"), digits_ids.data("validation")
    assert np.unique(train.read(0, len(train))[0]).size > 500
    model.fit(*train.read(0, len(train)), batch_size=32, epochs=3, verbose=0)
    found = model.evaluate(*test.read(0, len(test)), batch_size=400, verbose=0, return_dict=True)
    assert found["accuracy"] > 0.85


def test_a_model_takes_the_columns_of_criteo(monkeypatch: pytest.MonkeyPatch) -> None:
    from edl.zoo import deepfm

    monkeypatch.setenv("EDL_CRITEO", "day_0.txt")  # not opened: only its columns matter here
    monkeypatch.setenv("EDL_CLICKS_BUCKETS", "1000")
    records = {
        "clicked": np.ones(4, np.float32),
        "numbers": np.ones((4, 13), np.float32),
        "ids": np.full((4, 26), -1),
    }
    x, y = deepfm.feed(records)
    assert clicks.widths() == (13, 26)
    assert deepfm.model()(x).shape == y.shape
