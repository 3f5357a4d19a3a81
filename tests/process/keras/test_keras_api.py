# SPDX-License-Identifier: Apache-2.0
"""docs/keras-api.md has a row for all that Keras has, and says what is so."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import keras
import pytest
from keras import callbacks as k

from edl import config
from edl.config import flat, values
from edl.errors import ModelError
from edl.trainer.callbacks.rules import BATCHES, HOOKS, TESTS, accepted
from tests.process.keras.callback_jobs import BATCH, EPOCHS, HELD_OUT, Ours, model
from tests.process.keras.models import X, Y

ROOT = Path(__file__).parents[3]
ROWS = tomllib.loads((ROOT / "scripts" / "dev" / "keras_api.toml").read_text())
EVERY_ROW = [(section, name) for section, rows in ROWS.items() for name in rows]
ALL_HOOKS = [name for name in dir(k.Callback) if name.startswith("on_")]


def arguments(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_every_argument_and_hook_of_keras_has_a_row() -> None:
    for function in (keras.Model.fit, keras.Model.compile, keras.Model.evaluate):
        assert list(ROWS[function.__name__]) == arguments(function)
    assert sorted(ROWS["Callback"]) == [name for name in dir(k.Callback) if not name.startswith("_")]


@pytest.mark.parametrize(("section", "name"), EVERY_ROW)
def test_a_row_names_tests_and_values_that_exist(section: str, name: str) -> None:
    row = ROWS[section][name]
    known = {*flat(values.defaults())}
    sections = {key.partition(".")[0] for key in known}
    for key in re.findall(r"`([a-z]+\.[a-zA-Z]+)`", row["text"]):
        assert key in known or key.partition(".")[0] not in sections, f"there is no value {key}"
    if test := row.get("test", ""):
        path, _, function = test.partition("::")
        function, _, case = function.partition("[")
        text = (ROOT / path).read_text()
        assert re.search(rf"^(async )?def {function}\(", text, re.MULTILINE)
        assert (
            not case
            or f'"{case[:-1]}"' in text
            or (path.endswith(Path(__file__).name) and case[:-1] in ALL_HOOKS)
        )


def test_rows_of_hooks_say_what_the_rules_of_callbacks_do() -> None:
    refused = {name for name, row in ROWS["Callback"].items() if row["how"] == "refused"}
    assert refused == {*BATCHES, *TESTS}
    assert {name for name in ALL_HOOKS if "predict" not in name} == {*HOOKS, *BATCHES, *TESTS}


@pytest.mark.parametrize("hook", [*BATCHES, *TESTS])
def test_a_hook_is_refused_by_name(hook: str) -> None:
    own = type("Own", (k.Callback,), {hook: lambda self, batch=0, logs=None: None})
    with pytest.raises(ModelError, match=rf"Own\.{hook}\(\) cannot be honoured over a ring"):
        accepted([own()], config.parse(values.defaults()), lambda text: None)


class Records(k.Callback):
    """Records the calls of every hook that is not refused."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.calls.append(("set_params", sorted(params), params["epochs"], params["steps"]))

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.calls.append(("set_model", type(model).__name__))


def recording(hook: str) -> Any:
    def called(self: Records, *given: Any) -> None:
        *epoch, logs = given if given else (None,)
        self.calls.append((hook, *epoch, sorted(logs or {})))

    return called


for hook in ALL_HOOKS:
    if ROWS["Callback"].get(hook, {}).get("how") == "exact":
        setattr(Records, hook, recording(hook))


def test_hooks_are_called_as_fit_calls_them() -> None:
    expected, ours = Records(), Records()
    model().fit(
        X,
        Y,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        validation_data=HELD_OUT,
        validation_batch_size=BATCH,
        callbacks=[expected],
        verbose=0,
    )
    job = Ours(lambda: [ours], 2)
    job.train()
    first = 2  # set_model() and set_params(), in any order
    assert sorted(ours.calls[:first], key=str) == sorted(expected.calls[:first], key=str)
    assert ours.calls[first:] == expected.calls[first:]
    assert {call[0] for call in ours.calls} == {*HOOKS, "set_model", "set_params"}
