"""Which job a command is about: the same options for all commands about a job."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from edl.cli.jobs import Job, Local
from edl.errors import ConfigError

DirArgument = Annotated[
    Path | None, typer.Argument(metavar="[DIR]", help="The job's output directory; default: the last job's.")
]


def job(
    directory: DirArgument = None,
    release: Annotated[
        str, typer.Option("--release", help="A release in a cluster, in place of a job of this machine.")
    ] = "",
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Of the release; default: the context's.")
    ] = "",
    kubeconfig: Annotated[
        Path | None, typer.Option("--kubeconfig", help="For --release; default: where kubectl looks, too.")
    ] = None,
    context: Annotated[
        str, typer.Option("--context", help="Of the kubeconfig; default: its current one.")
    ] = "",
) -> Job:
    """The job that is meant.

    Raises:
        ConfigError: the options do not go together.
        EdlError: no job was started on this machine.
    """
    if not release:
        said = {"--namespace": namespace, "--kubeconfig": kubeconfig, "--context": context}
        if lost := [option for option, value in said.items() if value]:
            raise ConfigError(f"{', '.join(lost)}: only with --release")
        return Local(directory)
    if directory is not None:
        raise ConfigError(f"--release {release} and {directory}: one job, please")
    from edl.cli.release import Release  # what talks to Kubernetes takes its time to import

    return Release(release, namespace, kubeconfig, context)


def about_a_job(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, in place of its parameter `job`, the options that say which one."""
    which = inspect.signature(job, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters
    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in (*own.values(), *which.values())
        if p.name != "job"
    ]

    @functools.wraps(command)
    def run(**said: Any) -> None:
        meant = job(**{name: said.pop(name) for name in which})
        command(job=meant, **said)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
