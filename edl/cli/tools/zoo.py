# SPDX-License-Identifier: Apache-2.0
"""`edl zoo`: the models of the zoo."""

from __future__ import annotations

from edl.cli import moved
from edl.cli.shared import display, groups, output
from edl.cli.shared.models import zoo
from edl.errors import EdlError

app = groups.group("zoo", "List the models of the zoo.", moved.ZooGroup)


@app.command("list")
def list_models(form: output.FormOption = output.Form.table) -> None:
    """List the models of the zoo."""
    models = zoo()
    if not models:
        raise EdlError("no model zoo is installed")
    display.listed("Model", models, form)
