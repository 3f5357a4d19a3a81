# SPDX-License-Identifier: Apache-2.0
"""The comments of the chart's values.yaml: at most two lines for each value, with its type."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from edl.config import values
from edl.config.job import flat

CHART = Path(__file__).parents[3] / "chart"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
COMMENT = re.compile(r"((?:^ *# .*\n)+) *([\w-]+):", re.MULTILINE)
OF_TYPE = {"bool": True, "int": 7, "float": 0.5, "string": "x", "list": [], "object": {}}


def allowed(value: Any, node: Any) -> bool:
    """Whether a schema allows values of this one's type; other limits are ignored."""
    if "enum" in node or "const" in node:
        return any(type(each) is type(value) for each in node.get("enum", [node.get("const")]))
    if "anyOf" in node:
        return any(allowed(value, each) for each in node["anyOf"])
    return "type" not in node or jsonschema.Draft7Validator({"type": node["type"]}).is_valid(value)


def test_the_comment_of_each_value_has_two_lines_at_most_and_its_type() -> None:
    text = (CHART / "values.yaml").read_text().partition("\n\n")[2]
    found = [(comment, key) for comment, key in COMMENT.findall(text) if "# -- " in comment]
    assert [key for comment, key in found if comment.count("\n") > 2] == []
    assert [key for comment, key in found if not re.match(r" *# -- \([a-z/]+\) ", comment)] == []


@pytest.mark.parametrize(
    "key", [key for key in flat(values.defaults()) if not key.startswith("extraObjects")]
)
def test_the_type_in_a_comment_is_one_that_the_schema_allows(key: str) -> None:
    node: Any = SCHEMA
    for name in key.split("."):
        node = node["properties"][name]
    name = key.rpartition(".")[2]
    depth = "  " * key.count(".")
    text = (CHART / "values.yaml").read_text()
    for section in key.split(".")[:-1]:
        text = re.split(rf"^ *{section}:\n", text, maxsplit=1, flags=re.MULTILINE)[1]
    comment = re.search(rf"{depth}# -- \(([a-z/]+)\) .*\n(?:{depth}# .*\n)?{depth}{name}:", text)
    if comment is not None:  # some values are Kubernetes' own
        assert all(allowed(OF_TYPE[kind], node) for kind in comment[1].split("/"))
