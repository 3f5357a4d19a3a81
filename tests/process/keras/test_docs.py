# SPDX-License-Identifier: Apache-2.0
"""The pages for users list what is compared with Keras, and no more; a model in them can be built."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from edl.layers.row_location import rows_elsewhere
from tests.process.keras import (
    embedding_models,
    own_step_cases,
    test_inputs,
    test_layers,
    test_losses,
    test_optimizers,
    test_precision,
    test_published,
)

DOCS = Path(__file__).parents[3] / "docs"
PAGE = Path(__file__).with_name("compared.md")
MARK = "<!-- of tests/process/keras; a test there compares -->\n"


def compared() -> str:
    rows: dict[str, Iterable[str]] = {
        "Losses": test_losses.CASES,
        "Optimizers": {**test_optimizers.CASES},
        "Layers": test_layers.CASES,
        "`BatchNormalization(synchronized=True)`": test_layers.SYNCHRONIZED,
        "Inputs and ways to run": test_inputs.CASES,
        "`edl.layers.Embedding`, rows on servers": embedding_models.CASES,
        "Precision": test_precision.CASES,
        "Your own `train_step`": own_step_cases.MEANS,
        "Examples of keras.io": test_published.CASES,
    }
    table = "".join(f"| {title} | {'; '.join(cases)} |\n" for title, cases in rows.items())
    return f"\n| | |\n| --- | --- |\n{table}"


def test_the_list_of_what_is_compared_is_that_of_the_tests() -> None:
    assert PAGE.read_text().partition(MARK)[2] == compared(), "write what was expected into compared.md"


def test_the_first_model_of_the_page_on_embeddings_is_built_as_it_stands_there() -> None:
    found = re.search(r"```python\n(.*?)```", (DOCS / "embeddings.md").read_text(), re.DOTALL)
    assert found is not None
    module: dict[str, Any] = {}
    exec(found[1], module)
    with rows_elsewhere():
        model = module["model"]()
        texts = tf.ragged.constant([["a", "b"], []], dtype=tf.string)
        outputs = model({"user_id": tf.constant([7, 1 << 40]), "tags": texts})
    assert outputs.shape == (2, 1)


@pytest.mark.parametrize("page", ["first-ring.md", "coming-from-fit.md"])
def test_a_script_with_fit_trains_and_its_model_file_has_the_same_model_and_records(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script, file = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)[:2]
    before: dict[str, Any] = {}
    exec(script, before)
    assert [path.suffix for path in tmp_path.iterdir()] == [".keras"]
    after: dict[str, Any] = {}
    exec(file, after)
    for name in ("loss", "metrics"):
        assert after["model"]().get_compile_config()[name] == before["model"].get_compile_config()[name]
    assert [v.shape for v in after["model"]().weights] == [v.shape for v in before["model"].weights]
    records = [
        np.concatenate(arrays)
        for arrays in zip(after["data"]("train"), after["data"]("validation"), strict=True)
    ]
    np.testing.assert_array_equal(records[0], before["x"])
    np.testing.assert_array_equal(records[1], before["y"])


def test_a_script_and_its_counterpart_train_for_as_many_epochs() -> None:
    text = (DOCS / "coming-from-fit.md").read_text().partition("## Notebooks and scripts")[0]
    assert set(re.findall(r"epochs[= ](\d+)", text)) == {"20"}


def test_the_model_of_the_page_on_strategies_trains_on_files_as_it_describes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    after = re.findall(r"```python\n(.*?)```", (DOCS / "keras3.md").read_text(), re.DOTALL)[1]
    (tmp_path / "data" / "train").mkdir(parents=True)
    with tf.io.TFRecordWriter("data/train/a.tfrecord") as file:
        for number in range(4):
            values = {"x": [float(number)] * 8, "y": [2.0 * number]}
            features = {
                k: tf.train.Feature(float_list=tf.train.FloatList(value=v)) for k, v in values.items()
            }
            file.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    module: dict[str, Any] = {}
    exec(after, module)
    x, y = module["data"]("train").read(0, 4)
    assert (x.shape, y.ravel().tolist()) == ((4, 8), [0.0, 2.0, 4.0, 6.0])
    assert np.isfinite(module["model"]().fit(x, y, verbose=0).history["loss"][0])
