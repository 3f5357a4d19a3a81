# SPDX-License-Identifier: Apache-2.0
"""Output for programs: documents with a version, as JSON or YAML, where people get a table.

docs/output.md lists the fields. Fields may be added to a version. A field that is renamed or removed, or
whose meaning changes, gives a new version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
import yaml

from edl.errors import ConfigError

VERSION = "edl.dev/v1"


class Form(StrEnum):
    """A form of the output, by the name that -o takes."""

    table = "table"
    wide = "wide"
    json = "json"
    yaml = "yaml"

    @property
    def is_document(self) -> bool:
        """True for the forms that programs read."""
        return self in (Form.json, Form.yaml)


class TextForm(StrEnum):
    """A form of a report that is no table."""

    text = "text"
    json = "json"


TextOption = Annotated[TextForm, typer.Option("-o", help="The form of the output.")]
FormOption = Annotated[
    Form, typer.Option("-o", help="The form of the output; wide is a table with more columns.")
]


def _refuse_json(given: bool) -> None:
    if given:
        raise ConfigError("--json: it is -o json now, with the fields of docs/output.md")


OldJson = Annotated[bool, typer.Option("--json", hidden=True, callback=_refuse_json)]


def write(kind: str, body: Mapping[str, Any] | Sequence[Mapping[str, Any]], form: Form) -> None:
    """Print a document.

    Args:
        kind: the kind of its contents; a list of them gives a document of `kind`List.
        form: json or yaml.
    """
    if isinstance(body, Mapping):
        document = {"apiVersion": VERSION, "kind": kind, **body}
    else:
        document = {"apiVersion": VERSION, "kind": f"{kind}List", "items": list(body)}
    text = json.dumps(document, indent=1)
    if form is Form.yaml:  # of the same text, so that tuples and enumerations are what JSON makes of them
        text = yaml.safe_dump(json.loads(text), sort_keys=False, allow_unicode=True, width=110).rstrip("\n")
    print(text)


def job(data: Mapping[str, Any], model: str, ended: bool) -> dict[str, Any]:
    """Convert the status of a job, or its summary, to the body of a document.

    Args:
        model: the model as it was given; "": unknown.
        ended: `data` is the summary, whose `model` is the file of the trained model.
    """
    body = dict(data)
    if ended:
        body = {("model_file" if key == "model" else key): value for key, value in data.items()}
    body.setdefault("model", model)
    in_a_cluster = "release" in body
    for kind in ("workers", "servers"):
        if isinstance(body.get(kind), list):
            body[kind] = [_process(row, in_a_cluster) for row in body[kind]]
    return body


def _process(row: Mapping[str, Any], in_a_cluster: bool) -> dict[str, Any]:
    """Name what runs a worker or a server: a pod in a cluster, a process on this machine."""
    renamed = {}
    for key, value in row.items():
        if key != "handle":
            renamed[key] = value
        elif in_a_cluster:
            renamed["pod"] = value or None
        else:
            renamed["pid"] = int(value) if str(value).isdecimal() else None
    return renamed
