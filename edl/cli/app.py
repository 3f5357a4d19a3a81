# SPDX-License-Identifier: Apache-2.0
"""The commands of `edl`, and the modules that implement them.

run          edl run, master, worker: processes of this machine
listing      edl list, rm: the jobs of this machine, the releases of a cluster
mpi          edl mpi: a job whose workers mpiexec starts
manage       edl status, logs, wait, scale, stop, token: a started job, here or in a cluster
new          edl new: a model file to begin with
example      edl example: whole examples, to look at and to change
check        edl check: a trial of a model file and its data
data         edl data inspect: what is in files of data
elasticdl    edl elasticdl: ElasticDL's command line
history      edl audit, replay: a job's journal
checkpoint   edl checkpoint: a job's checkpoint now, and the contents of a checkpoint directory
chaos        edl chaos: a rehearsal of failures on a running job
plan         edl plan: values for a job, from a short run of it
completion   edl completion: scripts with which a shell completes commands
explain      edl explain: the meaning of a value
report       edl report: pictures of a job
ui           edl ui: the live page of a job
model        edl model: a copy of the trained model, or one from a checkpoint or in a different format
rows         edl rows export: rows of parameter servers, as files
zoo          edl zoo: models that come with edl
image        edl image: an image with models of your own
moved        old names of commands
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any

import typer

import edl
from edl.cli import (
    chaos,
    check,
    checkpoint,
    completion,
    data,
    elasticdl,
    example,
    explain,
    history,
    horovod,
    image,
    listing,
    manage,
    model,
    moved,
    mpi,
    new,
    plan,
    report,
    rows,
    run,
    ui,
    zoo,
)


class Root(moved.RootGroup):
    """`edl`: suggests a choice of an option if an invalid one is similar."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            BadParameter: an argument or option is invalid.
        """
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's, which Typer calls
            if found := re.match(r"'(.*)' is not one of (.*)", error.message):
                choices = re.findall("'([^']*)'", found[2])
                if near := difflib.get_close_matches(found[1], choices, 1, 0.5):
                    error.message = f"{error.message.rstrip('.')}; did you mean {near[0]}?"
            raise


app = typer.Typer(
    name="edl",
    cls=Root,
    help="Elastic training of Keras models: workers may come and go, every record counts exactly once.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(cls=run.RunCommand)(run.run)
for command in (
    new.new,
    check.check,
    manage.status,
    manage.logs,
    manage.wait,
    manage.scale,
    manage.stop,
    manage.token,
    history.audit,
    history.replay,
    mpi.mpi,
    run.master,
    run.worker,
):
    app.command()(command)
for foreign in (horovod.horovod, elasticdl.elasticdl):  # which parse their own flags
    app.command(
        context_settings={
            "ignore_unknown_options": True,
            "allow_extra_args": True,
            "allow_interspersed_args": False,
        },
        add_help_option=False,
    )(foreign)
app.command("list")(listing.list_jobs)
app.command()(listing.rm)
app.command()(report.report)
app.command()(ui.ui)
app.command()(chaos.chaos)
app.command()(plan.plan)
app.command()(explain.explain)
app.command()(completion.completion)
app.add_typer(checkpoint.app)
app.add_typer(data.app)
app.add_typer(example.app)
app.add_typer(image.app)
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
