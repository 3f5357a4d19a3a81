# SPDX-License-Identifier: Apache-2.0
"""The commands of `edl`, and the modules that implement them.

run          edl run, master, worker: processes of this machine
listing      edl list, rm: the jobs of this machine, the releases of a cluster
manage       edl status, logs, wait, scale, stop, token: a started job, here or in a cluster
new          edl new: a model file to begin with
example      edl example: whole examples, to look at and to change
check        edl check: a trial of a model file and its data
data         edl data inspect: what is in files of data
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

The commands of what comes from elsewhere are in `edl.integrations`.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any

import typer

import edl
from edl import integrations
from edl.cli import completion, moved
from edl.cli.jobs import checkpoint, history, listing, manage, model, rows, ui
from edl.cli.shared.groups import Section
from edl.cli.start import run
from edl.cli.tools import chaos, check, data, example, explain, image, new, plan, report, zoo


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
# Commands that parse the flags of a different program.
_FOREIGN = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
_SPECIAL: dict[Any, dict[str, Any]] = {
    run.run: {"cls": run.RunCommand},
    listing.list_jobs: {"name": "list"},
}
_ELSEWHERE = integrations.installed(integrations.COMMANDS)
_SPECIAL |= {
    command: {"context_settings": _FOREIGN, "add_help_option": False}
    for name, command in _ELSEWHERE.items()
    if name in integrations.FOREIGN_FLAGS
}
_COMMANDS: dict[Section, tuple[Any, ...]] = {
    Section.START: (
        new.new,
        check.check,
        run.run,
        plan.plan,
        explain.explain,
        data.app,
        example.app,
        zoo.app,
    ),
    Section.WATCH: (manage.status, manage.logs, manage.wait, listing.list_jobs, report.report, ui.ui),
    Section.CHANGE: (manage.scale, manage.stop, listing.rm, checkpoint.app),
    Section.RESULTS: (history.audit, model.app, rows.app),
    Section.CLUSTER: (image.app,),
    Section.ELSEWHERE: tuple(_ELSEWHERE.values()),
    Section.ADVANCED: (
        chaos.chaos,
        history.replay,
        manage.token,
        run.master,
        run.worker,
        completion.completion,
    ),
}
for section, commands in _COMMANDS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, rich_help_panel=section)
        else:
            app.command(rich_help_panel=section, **_SPECIAL.get(command, {}))(command)


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
