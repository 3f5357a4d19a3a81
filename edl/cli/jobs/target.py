# SPDX-License-Identifier: Apache-2.0
"""Selection of a job: the options that all commands about a job share."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from edl.cli.local.job import Local
from edl.cli.local.latest import Scope
from edl.cli.shared.groups import with_parameters
from edl.cli.shared.jobs import JobHandle
from edl.errors import ConfigError

MAX_RELEASE = 63  # characters; also for the prefix of a release's objects


def _argument(scope: Scope) -> Any:
    default = f"default: {scope.value}" if scope.value else "it has no default"
    return typer.Argument(metavar="DIR", help=f"The job directory, to which `edl run` writes; {default}.")


DirArgument = Annotated[Path | None, _argument(Scope.MACHINE)]
KubeconfigOption = Annotated[
    Path | None, typer.Option("--kubeconfig", help="The kubeconfig; default: as for kubectl.")
]
ContextOption = Annotated[
    str, typer.Option("--context", help="The context of the kubeconfig; default: its current context.")
]


def target(
    directory: DirArgument = None,
    release: Annotated[
        str, typer.Option("--release", help="A release in a cluster, instead of a job of this machine.")
    ] = "",
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="The release's namespace; default: the context's.")
    ] = "",
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = "",
    scope: Scope = Scope.MACHINE,
) -> AbstractContextManager[JobHandle]:
    """The selected job, as a context manager.

    Args:
        scope: where to look for a job if neither `directory` nor `release` is given; not an option.

    Raises:
        ConfigError: the options contradict each other.
        EdlError: no job is selected, or the release does not exist.
    """
    if not release:
        given = {"--namespace": namespace, "--kubeconfig": kubeconfig, "--context": context}
        if unused := [option for option, value in given.items() if value]:
            raise ConfigError(f"{', '.join(unused)}: only valid with --release")
        return nullcontext(Local(directory, scope))
    if directory is not None:
        raise ConfigError(f"--release and DIR are mutually exclusive (--release {release}, DIR {directory})")
    if len(release) > MAX_RELEASE:
        raise ConfigError(
            f"--release {release[:9]}...: a release's name has at most {MAX_RELEASE} characters"
        )
    from edl.cli.release.job import connect  # imported late, because the Kubernetes client is slow to import

    return connect(release, namespace, kubeconfig, context)


def seconds(text: str) -> float:
    """Parse a duration such as 90s, 30m or 2h to seconds; a number without a unit is in seconds.

    Raises:
        BadParameter: the text is no duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match:
        raise typer.BadParameter(f"invalid duration {text!r} (expected e.g. 90s, 30m, 2h)")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def about_a_job(command: Callable[..., None], scope: Scope = Scope.MACHINE) -> Callable[..., None]:
    """Replace the parameter `job` of a command by the options that select the job."""
    options = {**inspect.signature(target, eval_str=True).parameters}
    del options["scope"]
    options["directory"] = options["directory"].replace(annotation=Annotated[Path | None, _argument(scope)])
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "job"]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        with target(**{name: given.pop(name) for name in options}, scope=scope) as job:
            command(job=job, **given)

    return with_parameters(run, [*own, *options.values()])


# `edl stop` in the wrong folder must not stop a job of a different one.
changes_a_job = functools.partial(about_a_job, scope=Scope.HERE)
changes_a_named_job = functools.partial(about_a_job, scope=Scope.NOWHERE)
