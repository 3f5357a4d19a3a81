"""The commands of `edl`, and the modules that implement them.

run          edl run, master, worker: processes of this machine
manage       edl status, logs, wait, scale, checkpoint, stop, token: a started job, here or in a cluster
history      edl audit, replay: a job's journal
checkpoints  edl checkpoints: the contents of a checkpoint directory
export       edl export: a model from a checkpoint, or in a different format
model        edl model get: a copy of the trained model
rows         edl rows export: rows of parameter servers, as files
zoo          edl zoo ...: models, and images of them
"""

from __future__ import annotations

from typing import Annotated

import typer

import edl
from edl.cli import checkpoints, export, history, manage, model, rows, run, zoo

app = typer.Typer(
    name="edl",
    help="Elastic training of Keras models: workers may come and go, every record counts exactly once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    run.run, manage.status, manage.logs, manage.wait, manage.scale, manage.checkpoint, manage.stop,
    manage.token, history.audit, history.replay, checkpoints.checkpoints, export.export, run.master,
    run.worker,
):  # fmt: skip
    app.command()(command)
app.add_typer(model.app)
app.add_typer(rows.app)
app.add_typer(zoo.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"edl {edl.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    pass
