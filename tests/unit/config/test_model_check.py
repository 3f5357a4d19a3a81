# SPDX-License-Identifier: Apache-2.0
"""A model that comes as one file: what is refused before a worker is started for it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.config import model_check
from edl.errors import ModelError
from edl.trainer.model import user_model

ROOT = Path(__file__).parents[3]
GOOD = """
import edl, keras

def model():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    return model

def data(split):
    return edl.csv(f"{split}.csv")
"""
MODEL, DATA = "def model():\n    return 1\n", "def data(split):\n    return 1\n"

# A text, and what its only line says.
WRONG = [
    ("", "is empty"),
    (" \n\t\r\n", "is empty"),
    ("\ufeff\n", "is empty"),
    ("def model(:\n", "line 1: invalid syntax"),
    (GOOD + "def more()\n    pass\n", "line 11: expected ':': def more()"),
    (GOOD + "  x = 1\n", "line 11: unindent does not match"),
    (GOOD + "if True:\n\tx = 1\n        y = 2\n", "line 13: inconsistent use of tabs"),
    (GOOD + "print 'hello'\n", "line 11: Missing parentheses"),
    (GOOD + "x = 'open\n", "line 11: unterminated string literal"),
    (GOOD + "return 3\n", "line 11: 'return' outside function"),
    (GOOD + "await x\n", "line 11: 'await' outside function"),
    (
        GOOD + "def f():\n    x = 1\n    global x\n",
        "line 13: name 'x' is assigned to before global declaration",
    ),
    (GOOD + "x = 08\n", "line 11: leading zeros"),
    (GOOD + "\u201cquoted\u201d\n", "line 11: invalid character"),
    (GOOD + "\0", "cannot contain null bytes"),
    (GOOD + "\udcff", "line 11: not UTF-8"),
    ("PK\x03\x04\x14", "line 1: invalid non-printable character"),
    ("# coding: latin-1\n" + GOOD, "line 1: names the encoding latin-1; save the file as UTF-8"),
    ("#!/usr/bin/python\n# -*- coding: cp1252 -*-\n" + GOOD, "line 2: names the encoding cp1252"),
    (GOOD + "(" * 500 + ")" * 500, "line 11: too many nested parentheses"),
    (GOOD + "-" * 100_000 + "1\n", "nested too deeply"),
    (GOOD + "#" * model_check.MAX_CHARACTERS, "characters; at most 262,144"),
    (
        "import horovod.tensorflow.keras as hvd\nhvd.init()\n" + MODEL + DATA + "rank = hvd.rank()\n",
        "line 1: imports Horovod, and edl makes the ring of workers and averages gradients itself: remove "
        "what uses Horovod (lines 1, 2 and 7). A training script that was written for "
        "Horovod runs unchanged: edl horovod -np N",
    ),
    (
        MODEL + "def data(split):\n    from horovod import tensorflow\n    return 1\n",
        "remove what uses Horovod (line 4).",
    ),
    ("import keras\n" + MODEL, "has no function data(). A model file defines model() and data(split)"),
    (DATA, "has no function model()."),
    (
        "import keras\nnet = keras.Sequential()\nnet.fit([1])\n",
        "line 3: calls fit(), as a training script does. edl makes the calls of fit() itself: let model() "
        "return the compiled model and data(split) the arrays (docs/coming-from-fit.md)",
    ),
    ("import keras\nkeras.Sequential().fit([1])\n" + MODEL, "has no function data()."),
    (DATA + "def build_model():\n    return 1\n", "has no function model(); it has build_model()."),
    (DATA + "class Net:\n    def model(self):\n        return 1\n", "has no function model()."),
    (DATA + "def outer():\n    def model():\n        return 1\n", "has no function model()."),
    (DATA + "# def model():\n", "has no function model()."),
    (DATA + "print(model)\n", "has no function model()."),
    (DATA + "def model(classes):\n    return 1\n", "line 3: model(classes) is called as model()"),
    (DATA + "def model(*, classes):\n    return 1\n", "line 3: model(*, classes) is called as model()"),
    (MODEL + "def data(a, b):\n    return 1\n", "line 3: data(a, b) is called as data(split) or data()"),
    (MODEL + "def data(split, path):\n    return 1\n", "line 3: data(split, path) is called as data(split)"),
    (MODEL + "def data(*, split):\n    return 1\n", "line 3: data(*, split) is called as data(split)"),
    (GOOD + "def feed(x, y):\n    return x, y\n", "line 11: feed(x, y) is called as feed(records)"),
    (
        GOOD + "if True:\n    def model(size):\n        return size\n",
        "line 12: model(size) is called as model()",
    ),
]
# What is right, or may be.
RIGHT = [
    GOOD,
    GOOD + "try:\n    import horovod.tensorflow as hvd\nexcept ImportError:\n    hvd = None\n",
    "\ufeff" + GOOD,
    GOOD.replace("\n", "\r\n"),
    "# -*- coding: utf-8 -*-\n" + GOOD,
    GOOD + "# " + "\u00e4" * 100,
    GOOD + "x = '\\d'\n",  # a SyntaxWarning
    MODEL + "def data(split, path='x'):\n    return 1\n",
    MODEL + "def data(*splits):\n    return 1\n",
    MODEL + "def data(split, **more):\n    return 1\n",
    DATA + "def model(size=3, *, depth=2):\n    return size\n",
    DATA + "model = lambda: 1\n",
    DATA + "import functools\nmodel = functools.partial(print)\n",
    DATA + "def model(size):\n    return size\nmodel = functools.partial(model, 3)\n",
    DATA + "@decorated\ndef model(size):\n    return size\n",
    DATA + "class model:\n    pass\n",
    DATA + "model = keras.Sequential([1])\ndef model():\n    return 1\n",
    DATA + "model = make()\n",
    DATA + "model: object = print\n",
    DATA + "from library import build as model\n",
    DATA + "try:\n    from library import model\nexcept ImportError:\n    def model():\n        return 1\n",
    DATA + "with open('x') as model:\n    pass\n",
    DATA + "if (model := print):\n    pass\n",
    DATA + "from library import *\n",
    "from library import model, data\n",
    DATA + "match 3:\n    case 3:\n        def model():\n            return 1\n",
    DATA + "def make():\n    global model\n    model = print\nmake()\n",
    DATA + "globals()['model'] = print\n",
    "def __getattr__(name):\n    return print\n",
]


# How a feed() with these parameters is called; None: not at all, and that is said.
FEEDS = {
    "records": "of records",
    "*records": "of records",
    "records, scale=255": "of records",
    "records, *, scale=255": "of records",
    "records, **more": "of records",
    "records, split": "of records, split",
    "records, split, /": "of records, split",
    "x, y": None,
    "records, split='train'": "of records, split",
    "records, split, scale=255": "of records, split",
    "": None,
    "records, split, scale": None,
    "records, scale=255, split='train'": None,
    "records, *, split='train'": None,
    "records, *, split": None,
    "*, records": None,
}


@pytest.mark.parametrize("parameters", FEEDS)
def test_feed_is_called_with_the_split_if_its_parameters_take_it(parameters: str, tmp_path: Path) -> None:
    text = f"{MODEL}{DATA}def feed({parameters}):\n    return dict(locals())\n"
    file = tmp_path / "mine.py"
    file.write_text(text)
    if (expected := FEEDS[parameters]) is None:
        line = f"line 5: feed({parameters}) is called as feed(records) or feed(records, split)"
        assert model_check.check(text, "mine.py") == [f"mine.py: {line}"]
        with pytest.raises(ModelError, match=r"is called as feed\(records\) or feed\(records, split\)"):
            user_model.load(str(file))
        return
    assert model_check.check(text) == []
    feed = user_model.load(str(file)).feed_of("test")
    assert feed is not None
    given = feed("these").values()
    assert ("test" in given) == (expected == "of records, split")
    assert "these" in given or ("these",) in given


@pytest.mark.parametrize(("text", "line"), WRONG)
def test_a_wrong_file_is_refused_in_one_line(text: str, line: str) -> None:
    [found] = model_check.check(text, "my_model.py")
    assert found.startswith("my_model.py: ")
    assert line in found
    assert "\n" not in found


@pytest.mark.parametrize("text", RIGHT)
def test_what_may_be_right_is_let_through(text: str) -> None:
    assert model_check.check(text) == []


def test_every_mistake_against_the_contract_is_named_at_once() -> None:
    found = model_check.check("def model(a):\n    return a\ndef feed():\n    return 1\n")
    assert [line.split(": ", 1)[1] for line in found] == [
        "has no function data(). A model file defines model() and data(split), or the values name the "
        "records (data.train)",
        "line 1: model(a) is called as model()",
        "line 3: feed() is called as feed(records) or feed(records, split)",
    ]


def test_data_may_take_no_split_or_be_missing_if_values_name_the_records() -> None:
    assert model_check.check(MODEL + "def data():\n    return 1\n") == []
    assert model_check.check(MODEL, with_data=False) == []
    assert "has no function model()" in model_check.check("x = 1\n", with_data=False)[0]


def test_nothing_of_the_file_is_run(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    assert model_check.check(f"open({str(proof)!r}, 'w')\n{GOOD}") == []
    assert not proof.exists()


@pytest.mark.parametrize("path", sorted((ROOT / "model_zoo").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_the_models_of_the_zoo_pass(path: Path) -> None:
    assert model_check.check(path.read_text()) == []


@given(st.text())
def test_any_text_is_judged(text: str) -> None:
    assert isinstance(model_check.check(text), list)


def test_another_text_is_another_run() -> None:
    assert model_check.digest(GOOD) == model_check.digest(str(GOOD))
    assert model_check.digest(GOOD) != model_check.digest(GOOD + "\n")
    assert len(model_check.digest("")) == 16
