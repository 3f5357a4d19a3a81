# SPDX-License-Identifier: Apache-2.0
"""A check of a model file reports each mistake once, with the line of the user's code."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import keras
import pytest
from PIL import Image

from edl import config
from edl.config import values
from edl.contract.model_report import ModelReport
from edl.trainer.export import saved_file
from edl.trainer.programs.check_model import Check

MODEL = """\
import edl
import keras
import numpy as np

LAYERS = [keras.Input((2,)), keras.layers.Dense(3)]


def model():
    model = keras.Sequential(LAYERS)
    model.compile({optimizer}, {loss})
    return model


def data():
    return {data}
"""
FEED = "\n\ndef feed(records):\n    return {feed}\n"
COMPILE, DATA, FEED_LINE = 10, 15, 19
OPTIMIZER = "keras.optimizers.SGD()"
GOOD = "np.ones((50, 2)), np.ones((50, 3))"
CLASSES = "np.ones((50, 2)), np.arange(50) % 3"
CSV = 'edl.csv("houses.csv")'
HOUSES = 'edl.csv("houses.csv", features=["rooms", "age"], label="price")'
COLUMNS = '{"a": records["rooms"], "b": records["age"]}, records["price"]'

# The file, the line of its mistake, and words of the message.
MISTAKES = {
    "missing label": (
        {"data": 'edl.csv("houses.csv", features=["rooms", "age"])'},
        DATA,
        "gives no labels, .* name their column",
    ),
    "unknown label": ({"data": HOUSES.replace("price", "prise")}, DATA, "column 'prise' is missing"),
    "wrong shape": (
        {"data": "np.ones((50, 5)), np.ones((50, 3))"},
        DATA,
        r"a record of features has shape \(5,\), and the model's input '.*' takes \(2,\)",
    ),
    "no compile": ({"optimizer": "None", "loss": "None"}, COMPILE, "compile its model with an optimizer"),
    "class numbers": (
        {"data": CLASSES, "loss": '"categorical_crossentropy"'},
        COMPILE,
        'a label is the number of a class, .*compile with loss="sparse_categorical_crossentropy"',
    ),
    "one value for each class": (
        {"loss": '"sparse_categorical_crossentropy"'},
        COMPILE,
        'compile with loss="categorical_crossentropy"',
    ),
    "too few classes": (
        {"data": "np.ones((50, 2)), np.arange(50)", "loss": '"sparse_categorical_crossentropy"'},
        COMPILE,
        r"the labels go from \d+ to \d+, and the model's output has 3 values: classes are numbered 0 to 2",
    ),
    "misspelt loss": ({"loss": '"mean_sqared_error"'}, COMPILE, "Could not interpret .*mean_sqared_error"),
    "wrong output": (
        {"data": "np.ones((50, 2)), np.ones((50, 2))"},
        COMPILE,
        r"a label has shape \(2,\), and the model's output \(3,\)",
    ),
    "feed returns a dict": (
        {"data": CSV, "feed": COLUMNS},
        FEED_LINE,
        "the features are a dict of 'a', 'b', and the model has one input",
    ),
    "feed returns four": ({"data": CSV, "feed": 'records["rooms"], 1, 2, 3'}, FEED_LINE, "not tuple of 4"),
    "feed raises": ({"data": CSV, "feed": 'records["romms"]'}, FEED_LINE, "KeyError: 'romms'"),
    "missing file": ({"data": 'edl.csv("hauses.csv")'}, DATA, "hauses.csv.* [nN]o such file"),
    "empty data": ({"data": "np.ones((0, 2)), np.ones((0, 3))"}, DATA, "has no records .expected at least 1"),
    "NaN": (
        {"data": "np.full((50, 2), np.nan), np.ones((50, 3))"},
        DATA,
        r"features is nan in record \d+, column 0, so the loss is not finite",
    ),
    "infinite loss": (
        {"optimizer": "keras.optimizers.SGD(1.0)", "loss": "lambda y, x: keras.ops.log(-1 - x * x)"},
        COMPILE,
        "the loss of 5 records is not finite, though all their values are",
    ),
    "text": (
        {"data": HOUSES.replace("age", "city")},
        DATA,
        "'city' is text, so the columns are no matrix; encode it with a layer",
    ),
    "a stream": ({"data": "(i for i in range(9))"}, DATA, "records in a row, not by index"),
    "a syntax error": ({"data": "np.ones((50, 2)"}, DATA, "was never closed"),
    "an import": ({"data": "None\nimport no_such_module"}, DATA + 1, "No module named 'no_such_module'"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{i % 7},{i},{('Oslo', 'Bergen')[i % 2]},{2 * i}" for i in range(40)]
    (tmp_path / "houses.csv").write_text("\n".join(["rooms,age,city,price", *lines]) + "\n")
    monkeypatch.chdir(tmp_path)


def checked(text: str, name: str, *sets: str) -> ModelReport:
    """The report on a file. Modes are decided, so that no process-wide setting for servers is changed."""
    path = Path(f"{name}.py")
    path.write_text(text)
    given = values.load([], ["mode=train", *sets])
    check = Check(config.parse(values.merge(given, {"model": {"module": str(path)}})))
    check.run()
    return ModelReport.from_json(check.report.to_json())


def a_model(data: str = GOOD, optimizer: str = '"sgd"', loss: str = '"mse"', feed: str = "") -> str:
    text = MODEL.format(data=data, optimizer=optimizer, loss=loss)
    return text + (FEED.format(feed=feed) if feed else "")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_once_with_its_line(name: str) -> None:
    parts, line, words = MISTAKES[name]
    report = checked(a_model(**parts), f"m{list(MISTAKES).index(name)}")
    mistake, *others = report.mistakes
    if others:  # prices of houses are one number, and the model has three outputs: a mistake of its own
        assert "houses.csv" in parts["data"]
        assert [re.match("a label has shape", other.why) is not None for other in others] == [True]
    assert mistake.line == line, mistake
    assert Path(mistake.file).name.startswith("m"), mistake
    assert re.search(words, mistake.why), mistake.why
    assert "\n" not in mistake.why


@pytest.mark.parametrize("compiled", [False, True])
def test_the_scope_of_a_strategy_is_refused_with_its_line(compiled: bool) -> None:
    """Whether the model is built in it, or only compiled."""
    line = (
        f'    model.compile({OPTIMIZER}, "mse")\n' if compiled else "    model = keras.Sequential(LAYERS)\n"
    )
    scope = f"    with tf.distribute.MirroredStrategy(['/cpu:0']).scope():\n    {line}"
    text = a_model(optimizer=OPTIMIZER).replace(line, scope)
    text = text.replace("numpy as np\n", "numpy as np, tensorflow as tf\n")
    text = text.replace("LAYERS = [keras.Input((2,)), keras.layers.Dense(3)]\n", "\n")
    text = text.replace("(LAYERS)", "([keras.Input((2,)), keras.layers.Dense(3)])")
    (found,) = checked(text, f"scope_{compiled}").mistakes
    assert (found.line, found.function) == (COMPILE - 1 + compiled, "model"), found
    assert re.search(r"works in the scope\(\) of MirroredStrategy, .* delete the strategy", found.why)


def test_independent_mistakes_are_all_reported() -> None:
    text = a_model('edl.csv("hauses.csv")').replace("keras.Sequential", "keras.Sequental")
    found = checked(text, "two").mistakes
    assert [(m.line, m.function) for m in found] == [(9, "model"), (DATA, "data")]
    of_a_step = a_model("np.ones((50, 5)), np.arange(50) % 3", loss='"categorical_crossentropy"')
    found = checked(of_a_step, "records_and_loss").mistakes
    assert [(m.line, m.function) for m in found] == [(DATA, "data"), (COMPILE, "model")]
    assert "takes (2,)" in found[0].why and "sparse_categorical_crossentropy" in found[1].why


def test_a_good_model_is_described() -> None:
    report = checked(a_model(HOUSES).replace("Dense(3)", "Dense(1)"), "good")
    assert report.mistakes == []
    assert [(s.name, s.records, s.source) for s in report.splits] == [
        ("train", 36, "data()"),
        ("validation", 4, "data.validationFraction=0.1 of data()"),
    ]
    features, labels = report.splits[0].arrays
    assert (features.name, features.shape, labels.shape) == ("features", (2,), ())
    assert [(a.dtype, a.shape) for a in report.outputs] == [("float32", (1,))]
    assert (report.parameters, report.trained, report.optimizer, report.steps) == (3, 3, "SGD", 2)
    assert report.loss is not None
    assert report.metrics.keys() == {"loss"}
    assert report.process_bytes > report.state_bytes > 3 * 4


def test_the_names_of_columns_and_classes_are_reported() -> None:
    report = checked(a_model(HOUSES).replace("Dense(3)", "Dense(1)"), "columns")
    assert [(s.columns, s.classes) for s in report.splits] == [(("rooms", "age"), ())] * 2
    for path in ("train/cat", "train/dog", "train/owl", "test/dog", "test/owl"):
        Path(path).mkdir(parents=True)
        if path != "train/dog":
            Image.new("RGB", (2, 2), "red").save(Path(path, "0.png"))
    text = a_model("edl.images(split)", loss='"sparse_categorical_crossentropy"').replace(
        "data()", "data(split)"
    )
    text = text.replace("keras.Input((2,))", "keras.Input((2, 2, 3)), keras.layers.Flatten()")
    report = checked(text, "classes")
    assert not report.mistakes, report.mistakes
    assert [(s.name, s.classes) for s in report.splits] == [
        ("train", ("cat", "dog", "owl")),
        ("validation", ("cat", "dog", "owl")),
    ]
    # The trained model says how its labels are numbered, without the records of its training.
    model = keras.Sequential([keras.Input((2, 2, 3)), keras.layers.Flatten(), keras.layers.Dense(3)])
    saved_file.save(model, Path("named.keras"), ["owl", "dog", "cat"])
    saved_file.save(model, Path("unnamed.keras"))
    assert keras.models.load_model("named.keras").count_params() == model.count_params()
    shutil.rmtree("train")
    for name, classes in (("named", ("owl", "dog", "cat")), ("unnamed", ("dog", "owl"))):
        report = checked(text, f"of_{name}", "mode=evaluate", f"initFrom.path={name}.keras")
        assert not report.mistakes, report.mistakes
        assert report.splits[0].classes == classes
        told = [line for line in report.warnings if "numbered by these records alone: 0 dog, 1 owl" in line]
        assert len(told) == (name == "unnamed")


def test_records_that_values_name_are_checked_without_data() -> None:
    text = a_model().partition("\n\ndef data")[0].replace("Dense(3)", "Dense(1)")
    named = "data.train=houses.csv,data.label=price,data.features[0]=rooms,data.features[1]=age"
    report = checked(text, "named", named)
    assert report.mistakes == []
    assert report.splits[0].source == "data.train=houses.csv"


def test_the_records_of_the_training_as_held_out_ones_are_a_warning() -> None:
    report = checked(a_model().replace("data()", "data(split)"), "same")
    assert report.mistakes == []
    assert any(
        "the records of data('validation') are those of the training" in line for line in report.warnings
    )


@pytest.mark.parametrize("mode", ["evaluate", "predict"])
def test_a_job_that_does_not_train_is_checked_with_its_split(mode: str) -> None:
    report = checked(a_model(), f"m_{mode}", f"mode={mode}")
    assert report.mistakes == []
    (split,) = report.splits
    assert (split.name, split.records) == (("validation", 5) if mode == "evaluate" else ("predict", 50))
    assert report.metrics.keys() == ({"loss"} if mode == "evaluate" else set())
