# SPDX-License-Identifier: Apache-2.0
"""`edl elasticdl`: ElasticDL's command line."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer
import yaml

import edl
from edl.cli.shared import display, models
from edl.cli.start import local_job
from edl.cli.tools import image
from edl.compat.elasticdl import flags as elasticdl_flags
from edl.compat.elasticdl.flags import EVALUATE, MODELS, PREDICT, TRAIN, Job
from edl.config import parse, values
from edl.errors import ConfigError, EdlError

HELP = """edl elasticdl train|evaluate|predict FLAGS
edl elasticdl zoo init|build|push

ElasticDL's command line: prints the values and the command that it amounts to,
and runs it. docs/coming-from-elasticdl.md has ElasticDL's flags. And these:

  --dry-run        only print
  --local          run processes on this machine, as edl run does
  --chart PATH     edl's chart; default: chart
  --set KEY=VALUE  values of edl; repeatable
  --plain-http     of zoo push: the registry has no HTTPS"""
END = "EOF"  # of the values in the printed command


def elasticdl(context: typer.Context) -> None:
    """Run a command line of ElasticDL, such as `edl elasticdl train`."""
    task, *line = context.args or ["--help"]
    if task in ("-h", "--help") or {"-h", "--help"} & {*line}:
        display.line(HELP)
    elif task == "zoo":
        _zoo(line)
    elif task in (TRAIN, EVALUATE, PREDICT):
        _job(elasticdl_flags.parse(task, line))
    else:
        raise ConfigError(f"edl elasticdl: unknown command {task} (expected train, evaluate, predict or zoo)")


def _job(job: Job) -> None:
    """Print what a command line amounts to, and run it.

    Raises:
        EdlError: Helm is not installed, or has failed.
    """
    merged = values.merge(values.defaults(), job.values)
    typed = parse(merged)
    for note in job.notes:
        display.line(f"# {note}")
    text = yaml.safe_dump(job.values, sort_keys=False, default_flow_style=False)
    output = Path(job.output or f"runs/{job.name}")
    verb = ["template"] if job.render else ["install"]
    command = ["helm", *verb, job.name, job.chart, "--namespace", job.namespace, "-f", "-"]
    shown = ["edl", "run", "--output", str(output), "-f", "-"] if job.local else command
    target = f" > {shlex.quote(job.render)}" if job.render and not job.local else ""
    display.line(f"{shlex.join(shown)} <<'{END}'{target}\n{text}{END}")
    if job.dry_run:
        return
    if job.local:
        models.check(typed.model.module, not typed.data.addresses, typed.model.functions)
        raise typer.Exit(local_job.run_job(output, merged, command="edl elasticdl"))
    if shutil.which("helm") is None:
        raise EdlError(
            "helm is not installed; --local runs the job on this machine, --dry-run only prints it"
        )
    if job.render:
        with open(job.render, "w", encoding="utf-8") as file:
            code = subprocess.run(command, input=text, text=True, stdout=file).returncode
    else:
        code = subprocess.run(command, input=text, text=True).returncode
    if code:
        raise EdlError(f"helm failed with exit code {code}")
    if not job.render:
        display.line(f"next: edl status --release {job.name} --namespace {job.namespace}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def _zoo(line: Sequence[str]) -> None:
    """`edl elasticdl zoo`: the image of a model zoo.

    Raises:
        ConfigError: a flag is unknown, or cannot be honoured.
    """
    what, *rest = line or [""]
    parser = _Parser(prog=f"edl elasticdl zoo {what}", allow_abbrev=False, add_help=False)
    if what == "init":
        parser.add_argument("--base_image", default=f"edl-worker:{edl.__version__}")
        for flag, default in (("--model_zoo", "."), ("--extra_pypi_index", ""), ("--cluster_spec", "")):
            parser.add_argument(flag, default=default)
        parser.add_argument("--local_pkg_dir", default="")
        found = parser.parse_args([*rest])
        _init(found)
    elif what == "build":
        parser.add_argument("path", nargs="?", default=".")
        parser.add_argument("--image", required=True)
        parser.add_argument("--extra_pypi_index", default="")
        found = parser.parse_args([*rest])
        image.build(found.image, Path(found.path), found.extra_pypi_index)
    elif what == "push":
        parser.add_argument("image")
        parser.add_argument("--plain-http", action="store_true")
        found = parser.parse_args([*rest])
        image.push(found.image, found.plain_http)
    else:
        raise ConfigError(f"edl elasticdl zoo: unknown command {what} (expected init, build or push)")


def _init(found: Any) -> None:
    if found.local_pkg_dir:
        raise ConfigError(
            "edl elasticdl zoo init --local_pkg_dir: name the wheels in requirements.txt of the zoo"
        )
    if found.base_image.startswith(("python:", "tensorflow/")):
        raise ConfigError(
            f"edl elasticdl zoo init --base_image={found.base_image}: expected an image of edl's "
            f"workers, such as "
            f"edl-worker:{edl.__version__}"
        )
    if found.extra_pypi_index:
        display.line(
            "# --extra_pypi_index: give it to `edl elasticdl zoo build`, where packages are installed"
        )
    if found.cluster_spec:
        display.line(
            "# --cluster_spec: no meaning here: it is run once, by `edl elasticdl train --cluster_spec`"
        )
    image.write(Path(found.model_zoo), "", found.base_image, False, MODELS, elasticdl=True)
