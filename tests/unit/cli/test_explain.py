# SPDX-License-Identifier: Apache-2.0
"""`edl explain`, and the short forms of values: each value has a meaning, and a short form is that value."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from edl.cli.app import app
from edl.cli.local.job_values import Given
from edl.config import flat, values
from edl.config.explained import explained
from edl.config.job import JOB
from edl.errors import ConfigError


def test_each_value_of_a_job_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = values.defaults()  # read once, not for each key
    monkeypatch.setattr(values, "defaults", lambda: copy.deepcopy(defaults))
    keys = [key for key in flat(values.defaults()) if key.partition(".")[0] in JOB]
    assert len(keys) > 50
    every = explained("")
    assert [value.key for value in every] == keys
    for value in every:
        assert value.type and len(value.meaning) > 20, value.key


def test_a_value_is_explained_with_its_type_default_and_whether_it_is_live() -> None:
    kind, live, _, meaning = lines("training.epochs")
    assert kind == f"training.epochs: an integer, at least 1, less than 16777216; default {DEFAULT_EPOCHS}"
    assert live == "A running job takes a new value over."
    assert "epoch" in meaning.lower()
    assert lines("training.batchSize")[1] == "A running job keeps its value."


def test_a_section_lists_its_values() -> None:
    assert [line.split()[0] for line in lines("journal")] == ["journal.maxBytes"]


def lines(key: str) -> list[str]:
    return CliRunner().invoke(app, ["explain", key]).stdout.splitlines()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("training.epoch", r"training.epoch: unknown key; did you mean training.epochs\?"),
        ("batchSize", r"did you mean training.batchSize or evaluation.batchSize\?"),
        ("nonsense", r"nonsense: unknown key; "),
    ],
)
def test_an_unknown_key_suggests_others(key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        explained(key)


@pytest.mark.parametrize(
    ("option", "key"),
    [("--workers", "workers"), ("--epochs", "training.epochs"), ("--batch-size", "training.batchSize")],
)
@pytest.mark.parametrize("command", ["run", "check", "plan", "master --output job"])
def test_a_short_form_is_its_value_and_goes_before_set(command: str, option: str, key: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "digits", "--set", f"{key}=3", option, "-1"])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(f"{key}: invalid value -1 (expected an integer")


def test_commands_that_start_or_check_a_job_take_values_by_the_same_options() -> None:
    group: Any = typer.main.get_command(app)
    taking = {}
    for name, command in group.commands.items():
        options = {param.name: (param.opts, param.help) for param in command.params}
        if "sets" in options:
            taking[name] = [options.get(each) for each in inspect.signature(Given).parameters]
    assert taking.keys() == {"run", "check", "plan", "mpi", "master"}
    assert all(each == taking["run"] and None not in each for each in taking.values())


def test_help_has_a_short_form() -> None:
    for words in (["-h"], ["report", "-h"], ["zoo", "list", "-h"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0 and "Usage: " in done.output, words


DEFAULT_EPOCHS = values.defaults()["training"]["epochs"]
