# SPDX-License-Identifier: Apache-2.0
"""What is refused, by name, before anything starts."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from edl import config
from edl.config import values
from edl.config.paths import keys
from edl.config.renamed import REMOVED, RENAMED, REPLACED, UNCHANGED
from edl.errors import ConfigError
from tests.unit.config.refused_values import IMPOSSIBLE, POSSIBLE, TAKEN, WRONG

SCHEMA = json.loads((Path(values.DEFAULTS).parent / "values.schema.json").read_text())


def merged(text: str) -> dict[str, Any]:
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


@pytest.mark.parametrize(("text", "words"), [*IMPOSSIBLE, *TAKEN])
def test_an_impossible_combination_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.parse(merged(text))


@pytest.mark.parametrize("text", [i[0] for i in IMPOSSIBLE])
def test_an_impossible_config_cannot_be_made_without_parse_either(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w+ is .* and [\w.]+ is"):
        config.File.model_validate(merged(text))


@pytest.mark.parametrize("text", POSSIBLE)
def test_a_possible_combination_is_accepted(text: str) -> None:
    config.parse(merged(text))


def test_all_mistakes_are_told_at_once_also_impossible_combinations() -> None:
    text = "{workers: 9, minWorkers: 12, maxWorkers: 8, training: {epochs: 0, nope: 1}, logLevel: loud}"
    with pytest.raises(ConfigError) as refusal:
        config.parse(merged(text))
    assert [line.split(":")[0] for line in str(refusal.value).splitlines()] == [
        "logLevel",
        "minWorkers is 12 and maxWorkers is 8",
        "training.epochs",
        "training.nope",
        "workers is 9 and maxWorkers is 8",
        "workers is 9 and minWorkers is 12",
    ]


def test_a_combination_with_a_wrong_value_is_not_judged() -> None:
    with pytest.raises(ConfigError) as refusal:
        config.parse(merged("{workers: many, maxWorkers: 8}"))
    expected = "expected an integer, at least 0, at most 2147483647"
    assert str(refusal.value) == f'workers: invalid value "many" ({expected})'


@pytest.mark.parametrize("found", [None, 3, [], "workers: 3"])
def test_what_is_no_map_at_all_is_refused_in_words(found: Any) -> None:
    with pytest.raises(ConfigError, match="a map"):
        config.parse(found)


def test_an_old_key_is_refused_with_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RENAMED, "training.rounds", "training.epochs")
    with pytest.raises(ConfigError) as refusal:
        config.parse(merged("{training: {rounds: 3, nonsense: 3}}"))
    assert str(refusal.value).splitlines()[1] == "training.rounds: renamed; use training.epochs"


@pytest.mark.parametrize("old", [old for old in RENAMED if old not in keys(config.File)])
def test_every_renamed_key_is_refused_with_the_new_one(old: str) -> None:
    assert RENAMED[old] in keys(config.File)
    *sections, last = old.split(".")
    values: dict[str, Any] = {last: 1}
    for section in reversed(sections):
        values = {section: values}
    with pytest.raises(ConfigError) as refusal:
        config.parse(merged(json.dumps(values)))
    assert str(refusal.value) == f"{old}: renamed; use {RENAMED[old]}"
    with pytest.raises(jsonschema.ValidationError, match=f"'renamed; use {RENAMED[old]}'"):
        jsonschema.validate(merged(json.dumps(values)), SCHEMA)


def test_a_renamed_key_with_the_default_of_the_oldest_chart_is_accepted() -> None:
    # `helm upgrade --reuse-values` brings it.
    oldest = config.flat(values.load_file(Path(__file__).parents[2] / "chart" / "data" / "values-0.1.0.yaml"))
    known = {key: UNCHANGED[key] for key in UNCHANGED if key in RENAMED}
    assert {key: oldest[key] for key in RENAMED if key in oldest} == known
    now = config.flat(values.defaults())
    assert {key: now[RENAMED[key]] for key in known} == known
    old = values.merge(values.defaults(), {"training": {"nonFinite": "stop"}, "highPriorityWorkers": 0})
    jsonschema.validate(old, SCHEMA)
    assert config.parse(old) == config.parse(values.defaults())


@pytest.mark.parametrize("old", REPLACED)
def test_a_removed_key_with_an_effect_is_refused_with_what_replaces_it_unless_it_was_off(old: str) -> None:
    section, last = old.split(".")
    refused = merged(f"{{{section}: {{{last}: true}}}}")
    with pytest.raises(ConfigError) as refusal:
        config.parse(refused)
    assert str(refusal.value) == f"{old}: {REPLACED[old]}"
    with pytest.raises(jsonschema.ValidationError, match=re.escape(REPLACED[old])):
        jsonschema.validate(refused, SCHEMA)
    if old not in UNCHANGED:  # what other charts have: no chart of ours has brought it
        return
    off = merged(f"{{{section}: {{{last}: {json.dumps(UNCHANGED[old])}}}}}")
    jsonschema.validate(off, SCHEMA)
    assert config.parse(off) == config.parse(values.defaults())


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ConfigError) as refusal:
        config.parse(merged(f"workers: {'x' * 10000}"))
    assert len(str(refusal.value)) < 200


def test_helm_turns_integers_into_floats_and_back() -> None:
    parsed = config.parse(merged("{workers: 3.0, elastic: {startupTimeoutSeconds: 7}}"))
    assert (parsed.workers, type(parsed.workers)) == (3, int)
    assert parsed.elastic.startup_timeout_seconds == 7.0


def test_every_value_has_a_field_and_every_field_a_value() -> None:
    assert sorted(config.flat(values.defaults())) == sorted(keys(config.File))


def sections(section: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [f.annotation for f in section.model_fields.values()]
    return [
        section,
        *(s for i in inner if isinstance(i, type) and issubclass(i, BaseModel) for s in sections(i)),
    ]


@pytest.mark.parametrize("null", [True, False], ids=["null", "absent"])
def test_what_may_be_empty_may_be_null_or_absent(null: bool) -> None:
    without, empty = values.defaults(), values.defaults()
    emptied = [key for key, value in config.flat(without).items() if value in ("", [], {})]
    assert len(emptied) > 60
    for key in emptied:
        *parents, last = key.split(".")
        inside: Any = without
        for parent in parents:
            inside = inside[parent]
        if null:
            inside[last] = None
        else:
            del inside[last]
    jsonschema.validate(without, SCHEMA)
    assert config.File.model_validate(without) == config.File.model_validate(empty)
    assert config.parse(without) == config.parse(empty)


def test_no_default_lives_in_python() -> None:
    assert len(sections(config.File)) > 20
    for model in sections(config.File):
        assert all(field.is_required() for field in model.model_fields.values())


def test_the_jobs_part_alone_is_enough_for_a_process() -> None:
    whole = values.defaults()
    job = config.of_job(whole)
    assert set(job) == set(config.JOB)
    assert set(job["ps"]) == {  # and nothing of what shapes a pod
        "servers",
        "replicas",
        "timeoutSeconds",
        "memoryMebibytes",
        "log",
        "gradsToWait",
        "maxStaleness",
        "scaleRateByStaleness",
        "pullSteps",
        "replaceEmbeddings",
    }
    assert set(job["worker"]) == {"gpuMemory"}
    assert config.parse(job) == config.parse(whole)
    with pytest.raises(ConfigError, match="workers: missing value"):
        config.parse({key: whole[key] for key in whole if key != "workers"})
    with pytest.raises(ConfigError, match="rbac: missing value"):
        config.parse({key: whole[key] for key in whole if key != "rbac"})


def test_a_model_as_one_file_is_read_with_the_values() -> None:
    text = "def model():\n    return 1\n"
    with pytest.raises(ConfigError, match=r"model.source: has no function data\(\)"):
        config.parse(merged(json.dumps({"model": {"source": text}})))
    given = config.parse(merged(json.dumps({"model": {"source": f"{text}data = print\n"}})))
    assert (given.model.name, given.model.module) == ("model.source", "digits")


def test_a_value_of_the_chart_is_no_change_of_the_job() -> None:
    old, new = values.defaults(), merged("{worker: {nodeSelector: {disk: fast}}, rbac: {create: false}}")
    assert config.frozen_changes(config.parse(old), config.parse(new)) == []


@pytest.mark.parametrize(("said", "meant"), [("1.5", 1.5), ("0.5", 0.5), ("30.0", 30.0), ("2.50", 2.5)])
def test_a_decimal_as_helm_hands_it_over_is_a_number(said: str, meant: float) -> None:
    flags = merged("{}")
    flags["elastic"]["heartbeatTimeoutSeconds"] = said
    jsonschema.validate(flags, SCHEMA)
    assert config.parse(flags).elastic.heartbeat_timeout_seconds == meant


def test_combinations_with_a_decimal_as_text_are_judged_too() -> None:
    with pytest.raises(
        ConfigError, match=r'elastic.joinDelaySeconds is "180.5" and elastic.startupTimeoutSeconds is 180'
    ):
        config.parse(merged("elastic: {joinDelaySeconds: '180.5'}"))


@pytest.mark.parametrize(
    ("said", "of", "meant"),
    [(0, 4, 0), (1, 4, 1), (9, 4, 4), ("50%", 4, 2), ("50%", 5, 3), ("100%", 3, 3), ("0%", 3, 0)],
)
def test_a_share_of_the_workers_is_rounded_up(said: int | str, of: int, meant: int) -> None:
    assert config.parse(merged(f"onDemandWorkers: {said}")).on_demand(of) == meant


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 32)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "3", "0.4", "0.50", "10.0", "7%", "/x", "spawn", "stop", "info", "digits"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["epochs", "x"]), inner),
    max_leaves=3,
)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*keys(config.File), "training", "worker", "x", "local.x"]), JSON, max_size=3
    )
)
def test_the_schema_and_the_types_accept_the_same(changes: dict[str, Any]) -> None:
    candidate = values.defaults()
    for key, value in changes.items():
        *sections, last = key.split(".")
        inside: Any = candidate
        for section in sections:
            inside = inside.get(section) if isinstance(inside, dict) else None
        if isinstance(inside, dict):
            inside[last] = value
    broken_by_schema = not jsonschema.Draft7Validator(SCHEMA).is_valid(candidate)
    try:
        config.parse(candidate)
        lines = []
    except ConfigError as error:
        # A combination, or whether a text is a model, is beyond a schema: only parse judges it.
        lines = [line for line in str(error).splitlines() if not line.split(":")[0].count(" is ")]
        lines = [line for line in lines if "has no function" not in line and "line 1: " not in line]
    assert broken_by_schema == bool(lines)


def test_live_values_may_change_and_the_others_may_not() -> None:
    old = config.parse(values.defaults())
    new = config.parse(
        merged("{workers: 2, logLevel: debug, training: {epochs: 3}, local: {startMethod: spawn}}")
    )
    assert config.frozen_changes(old, new) == ["local.startMethod"]
    other = config.parse(merged("{training: {epochs: 3, batchSize: 64, loadBalancing: speed}}"))
    assert config.frozen_changes(old, other) == ["training.batchSize", "training.loadBalancing"]


def test_values_that_do_nothing_any_more_are_accepted_and_change_nothing() -> None:
    for key in REMOVED:
        section, last = key.split(".")
        for value in (7, None, "x"):  # an older chart allowed all of these
            old = merged(f"{{{section}: {{{last}: {json.dumps(value)}}}}}")
            assert config.parse(old) == config.parse(values.defaults())
            jsonschema.validate(old, SCHEMA)
            assert values.merge(values.defaults(), old)[section][last] == value, "it is not taken away"


def test_a_value_beside_one_that_does_nothing_is_still_checked() -> None:
    with pytest.raises(ConfigError, match=r"data\.blockRecord: unknown"):
        config.parse(merged("data: {blockRecords: 7, blockRecord: 7}"))
    with pytest.raises(ConfigError, match=r"elastic\.leaseBatches: unknown"):
        config.parse(merged("elastic: {maxLeaseBatches: 7, leaseBatches: 7}"))
    with pytest.raises(ConfigError, match="data: "):
        config.parse(merged("{data: 3}"))


def test_a_running_job_may_be_scaled_to_zero_but_not_below() -> None:
    assert config.unscalable(values.defaults(), 0) == []
    assert config.unscalable(values.defaults(), 9) == []
    [why] = config.unscalable(values.load([], ["training.deterministic=true"]), 9)
    assert "a step has 8 blocks" in why
    assert config.unscalable(values.defaults(), -1) == [
        "workers is -1: expected at least 0, which suspends the job"
    ]
