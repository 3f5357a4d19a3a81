"""What is refused, by name, before anything starts."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from edl import config, values
from edl.errors import ConfigError

SCHEMA = json.loads((Path(values.DEFAULTS).parent / "values.schema.json").read_text())

# What somebody writes, the key that is blamed, and a word of the advice.
WRONG = [
    ("wrokers: 3", "wrokers", "did you mean workers?"),
    ("training: {epoch: 3}", "training.epoch", "did you mean training.epochs?"),
    ("elastic: {silence: 3}", "elastic.silence", "elastic.silenceSeconds"),
    ("local: {cpu: 3}", "local.cpu", "known: start, threads"),
    ("workers: three", "workers", "a whole number"),
    ("workers: -1", "workers", "at least 0"),
    ("workers: 2.5", "workers", "a whole number"),
    ("workers: true", "workers", "a whole number"),
    ("workers: '3'", "workers", "a whole number"),
    ("workers: null", "workers", "a value is needed"),
    ("workers: [1]", "workers", "a whole number"),
    ("minWorkers: 0", "minWorkers", "at least 1"),
    ("maxWorkers: 0", "maxWorkers", "at least 1"),
    ("model: digits", "model", "a map of keys"),
    ("model: {module: ''}", "model.module", "not empty"),
    ("model: {module: 7}", "model.module", "a text"),
    ("training: {epochs: 0}", "training.epochs", "at least 1"),
    ("training: {batchSize: 0}", "training.batchSize", "at least 1"),
    ("training: {batchSize: 16777216}", "training.batchSize", "less than"),
    ("training: {seed: -1}", "training.seed", "at least 0"),
    ("training: {nonFinite: ignore}", "training.nonFinite", "stop, skip"),
    ("data: {shuffle: 'yes please'}", "data.shuffle", "true or false"),
    ("data: {shuffle: 1}", "data.shuffle", "true or false"),
    ("data: {blockRecords: 0}", "data.blockRecords", "at least 1"),
    ("elastic: {silenceSeconds: 0.1}", "elastic.silenceSeconds", "at least 0.5"),
    ("elastic: {joinSeconds: -1}", "elastic.joinSeconds", "at least 0"),
    ("elastic: {graceSeconds: soon}", "elastic.graceSeconds", "a number"),
    ("elastic: {leaseBatches: 0}", "elastic.leaseBatches", "at least 1"),
    ("elastic: {maxFailures: -1}", "elastic.maxFailures", "at least 0"),
    ("logLevel: loud", "logLevel", "debug, info, warning, error"),
    ("local: {start: thread}", "local.start", "spawn, fork"),
    ("training: [1, 2]", "training", "a map of keys"),
]
IMPOSSIBLE = [
    ("{minWorkers: 5, maxWorkers: 3, workers: 3}", "minWorkers is 5 and maxWorkers is 3"),
    ("{workers: 9, maxWorkers: 8}", "workers is 9 and maxWorkers is 8"),
    ("{workers: 2, minWorkers: 3}", "workers is 2 and minWorkers is 3"),
]


def merged(text: str) -> dict:
    return values.merge(values.defaults(), yaml.safe_load(text))


def test_the_defaults_are_a_valid_configuration() -> None:
    assert config.parse(values.defaults()).workers == 4
    jsonschema.validate(values.defaults(), SCHEMA)


@pytest.mark.parametrize(("text", "key", "advice"), WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_value_is_refused_by_name(text: str, key: str, advice: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config.parse(merged(text))
    assert str(refusal.value).startswith(f"{key}: ")
    assert advice in str(refusal.value)


@pytest.mark.parametrize("text", [w[0] for w in WRONG])
def test_helm_refuses_the_same_by_the_schema(text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(text), SCHEMA)


@pytest.mark.parametrize(("text", "words"), IMPOSSIBLE)
def test_an_impossible_combination_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.parse(merged(text))


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        config.parse(merged("{workers: x, training: {epochs: 0, nope: 1}}"))
    assert len(str(refusal.value).splitlines()) == 3


def test_helm_turns_integers_into_floats() -> None:
    assert config.parse(merged("workers: 3.0")).workers == 3


def test_live_values_may_change_and_the_others_may_not() -> None:
    old = config.parse(values.defaults())
    new = config.parse(merged("{workers: 2, logLevel: debug, training: {epochs: 3}, local: {start: fork}}"))
    assert config.frozen_changes(old, new) == ["local.start", "training.epochs"]
