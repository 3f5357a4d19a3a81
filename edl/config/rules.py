# SPDX-License-Identifier: Apache-2.0
"""Invalid combinations of values that are valid by themselves, which no schema can express.

They are in chart/rules.yaml, for `edl` and for the chart's checks (chart/templates/checks.yaml).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from edl.config import chart
from edl.config import model_check as source_module
from edl.config.messages import shown
from edl.config.types import number

ADDRESSES = tuple(f"data.{split}" for split in ("train", "validation", "test", "predict"))
RULES = Path(__file__).resolve().parents[1] / "chart" / "rules.yaml"


class Rule(NamedTuple):
    """Values that are invalid when all conditions hold."""

    keys: list[str]
    when: list[str]
    words: str


@cache
def rules() -> list[Rule]:
    """The rules of chart/rules.yaml."""
    return [
        Rule(_filled(rule["keys"], each), _filled(rule.get("when", rule["keys"]), each), rule["words"])
        for rule in yaml.safe_load(RULES.read_text(encoding="utf-8"))
        for each in rule.get("each", [""])
    ]


def _filled(parts: list[str], each: str) -> list[str]:
    return [part.replace("{}", each) for part in parts]


def _holds(condition: str, flat_values: Mapping[str, Any]) -> bool:
    """Whether a condition holds; chart/rules.yaml describes its language."""
    negated = condition.startswith("not ")
    key, *rest = condition.removeprefix("not ").split(" ")
    value = number(flat_values[key])
    match rest:
        case []:
            holds = bool(value)
        case [">" | ">=" as op, other]:
            least = number(flat_values[other])
            holds = value > least or (op == ">=" and value == least)
        case ["same", other]:
            holds = value.rstrip("/") == flat_values[other].rstrip("/")
        case ["in", *texts]:
            holds = str(value) in texts
        case ["prefix", *texts]:
            holds = value.startswith(tuple(texts))
        case ["suffix", *texts]:
            holds = value.endswith(tuple(texts))
    return bool(holds) != negated


def _in_words(key: str, value: Any) -> str:
    return f"{key} is {'set' if key == 'token.value' else shown(value)}"


def impossible(flat_values: Mapping[str, Any]) -> list[str]:
    """List mistakes that no schema can express: invalid combinations, and a model.source that is not a model.

    A rule is checked only if all its keys are present.
    """
    source = flat_values.get("model.source")
    named = any(flat_values.get(key) for key in ADDRESSES)
    functions = flat_values.get("model.functions") or {}
    told = []
    if source and isinstance(source, str):
        told = source_module.check(source, with_data=not named, named=functions)
    script = flat_values.get("model.script")
    if isinstance(script, str) and "\n" in script:
        told += source_module.check(script, "model.script", contract=False)
    return [*told, *chart.impossible(flat_values)] + [
        f"{' and '.join(_in_words(key, flat_values[key]) for key in rule.keys)}: {rule.words}"
        for rule in rules()
        if all(key in flat_values for key in rule.keys)
        and all(_holds(condition, flat_values) for condition in rule.when)
    ]
