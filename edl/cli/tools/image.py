# SPDX-License-Identifier: Apache-2.0
"""`edl image`: a folder of your own models as an image, with docker or buildah."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import typer
import yaml

import edl
from edl import scratch
from edl.cli.shared import groups
from edl.cli.shared.models import read
from edl.config import model_check
from edl.contract import artifacts
from edl.errors import EdlError, ModelError

app = groups.group("image", "Build an image of workers with your models.")

MODELS = "/models"  # folder of the models in the image, unless `--models-path` names a different one
TOOLS = ("docker", "buildah")
_MODEL_OF_ELASTICDL = re.compile(r"^(def custom_model|class CustomModel)\b", re.M)
IGNORED = ".git\n.venv\nruns\n**/__pycache__\nDockerfile\nvalues.yaml\n.dockerignore\n"
DOCKERFILE = """\
# An image of edl's workers with the models of this folder: `edl image build --image NAME .`
ARG BASE={base}
FROM ${{BASE}}
USER root
{packages}
COPY . {models}
# The pod runs as an arbitrary user, on a read-only file system.
RUN chmod -R a+rX {models} && python -m compileall -q {models}
USER 10001:10001
"""
PACKAGES = """\
# What the models need beside edl's own packages, whose versions stay as they are.
COPY requirements.txt /opt/edl/models.txt
ARG PIP_CONFIG_FILE=/run/secrets/pip
RUN --mount=type=secret,id=pip --mount=type=secret,id=ca \\
    pip install --no-cache-dir -c /opt/edl/constraints.txt -r /opt/edl/models.txt"""
NO_PACKAGES = """\
# To add packages: write a requirements.txt, and `edl image init --force` once more."""
VALUES = """\
# For `helm install edl CHART --set workers=4 -f values.yaml --set image.registry=REGISTRY`: REGISTRY has
# edl-master; a repository below that begins with a registry is complete. All values: docs/configuration.md.
worker:
  image:
    # The image that `edl image build --image` and `edl image push` were given.
    repository: {repository}
    tag: "{tag}"
model:
  module: {module}{others}
"""


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of your models.")] = Path("."),
    image: Annotated[
        str, typer.Option("--image", help="The image's name, for values.yaml; default: the folder's name.")
    ] = "",
    base_image: Annotated[
        str, typer.Option("--base-image", help="The base image: one of edl's workers.")
    ] = f"edl-worker:{edl.__version__}",
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    models_path: Annotated[
        str, typer.Option("--models-path", help="The folder of the models in the image.")
    ] = MODELS,
) -> None:
    """Write a Dockerfile and a values file beside your models."""
    write(directory, image, base_image, force, models_path)


@app.command()
def build(
    image: Annotated[str, typer.Option("--image", help="The image's name, with registry and tag.")],
    directory: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of your models.")] = Path("."),
    extra_index: Annotated[
        str, typer.Option("--extra-index", help="An additional package index; it is not kept in the image.")
    ] = "",
) -> None:
    """Build the image, with docker or buildah."""
    if not (directory / "Dockerfile").is_file():
        raise EdlError(f"{directory}: no Dockerfile found; create one with `edl image init {directory}`")
    _check_model(directory)
    tool = _tool()
    with scratch.directory() as secrets:
        command = (
            ["docker", "buildx", "build", "--load"]
            if tool == "docker"
            # Needs no rights except to change the root directory, and uses the network of the host.
            else [
                "buildah",
                "bud",
                "--layers",
                "--network",
                "host",
                "--isolation",
                os.environ.get("BUILDAH_ISOLATION", "chroot"),
            ]
        )
        command += [*_secrets(secrets, extra_index), "-t", image, str(directory)]
        _run(
            tool,
            command,
            f"{image} was not built. If its base image was not found: build it with "
            "`scripts/images build`, or choose another with `edl image init --base-image`",
        )
    repository, tag = _split(image)
    print(f"built {image}; next: edl image push {image}, and then")
    print(
        f"  helm install edl CHART --set workers=4 -f {directory / 'values.yaml'}"
        f" --set worker.image.repository={repository},worker.image.tag={tag}"
        " --set image.registry=REGISTRY  # the one that has edl-master"
    )


@app.command()
def push(
    image: Annotated[str, typer.Argument(help="The image's name, with registry and tag.")],
    plain_http: Annotated[bool, typer.Option("--plain-http", help="Use HTTP instead of HTTPS.")] = False,
) -> None:
    """Push the image to its registry, with docker or buildah."""
    if "/" not in image:
        raise EdlError(f"{image}: registry missing (expected e.g. registry.example.org/team/{image})")
    tool = _tool()
    if tool == "buildah":
        command = [
            "buildah",
            "push",
            f"--tls-verify={str(not plain_http).lower()}",
            image,
            f"docker://{image}",
        ]
    else:  # the settings of docker's daemon list the registries without TLS
        command = ["docker", "push", image]
    _run(tool, command, f"{image} was not pushed")
    print(f"pushed {image}")


def write(
    directory: Path, image: str, base_image: str, force: bool, models_path: str, elasticdl: bool = False
) -> None:
    """Write a Dockerfile and a values file beside models.

    Args:
        elasticdl: the folder is a zoo of ElasticDL, whose models are in folders and have a custom_model().

    Raises:
        EdlError: the folder does not exist, or files with other contents would be overwritten.
    """
    if not directory.is_dir():
        raise EdlError(f"folder {directory} not found")
    repository, tag = _split(image or f"{directory.resolve().name.lower()}:1")
    found = [
        str(path.relative_to(directory))
        for path in sorted(directory.rglob("*.py") if elasticdl else directory.glob("*.py"))
        if (
            _MODEL_OF_ELASTICDL.search(read(path))
            if elasticdl
            else not model_check.check(read(path), most=None)
        )
    ]
    expected = "custom_model()" if elasticdl else "model() and data(split)"
    others = "".join(f"\n  # or: {models_path}/{name}" for name in found[1:])
    module = (
        f"{models_path}/{found[0]}"
        if found
        else f"{models_path}/my_model.py  # no model found; a model file has {expected}"
    )
    packages = PACKAGES if (directory / "requirements.txt").is_file() else NO_PACKAGES
    written = {
        "Dockerfile": DOCKERFILE.format(base=base_image, packages=packages, models=models_path),
        "values.yaml": VALUES.format(repository=repository, tag=tag, module=module, others=others),
        ".dockerignore": IGNORED,
    }
    paths = {directory / name: text for name, text in written.items()}
    differing = [str(path) for path, text in paths.items() if path.exists() and read(path) != text]
    if differing and not force:
        exist = "exists" if len(differing) == 1 else "exist"
        raise EdlError(f"{', '.join(differing)} already {exist}; nothing was written (--force overwrites)")
    for path, text in paths.items():
        try:
            artifacts.write_whole(path, text)
        except OSError as error:
            raise EdlError(f"{path}: cannot write: {error.strerror}") from error
        print(f"wrote {path}")
    if not found:
        print(f"no model found in {directory} (expected a Python file with {expected})")
    build = "elasticdl zoo build" if elasticdl else "image build"
    print(f"next: edl {build} --image {repository}:{tag} {directory}")


def _check_model(directory: Path) -> None:
    """Check the model that values.yaml names, if it is a file in this folder.

    Raises:
        ModelError: the file does not exist, or is not a model.
    """
    try:
        values = yaml.safe_load(read(directory / "values.yaml"))
        module = str(values["model"]["module"])
    except (EdlError, yaml.YAMLError, RecursionError, TypeError, KeyError):
        return  # not values of edl: Helm will validate them
    if not module.startswith(f"{MODELS}/"):
        return
    path = directory / module.removeprefix(f"{MODELS}/")
    if not path.is_file():
        raise ModelError(
            f"{directory / 'values.yaml'}: model.module is {module}, but file {path} was not found"
        )
    if wrong := model_check.check(read(path), str(path), most=None):
        raise ModelError("\n".join(wrong))


def _secrets(directory: Path, extra_index: str) -> list[str]:
    """Build options that pass this machine's access to the package index, without storing it in the image."""
    mine = configparser.RawConfigParser()
    mine.read([os.environ.get("PIP_CONFIG_FILE", "/etc/pip.conf"), Path.home() / ".config/pip/pip.conf"])
    said = dict(mine["global"]) if mine.has_section("global") else {}
    certificates = os.environ.get("PIP_CERT") or said.pop("cert", "")
    index, extra = os.environ.get("PIP_INDEX_URL"), [said.get("extra-index-url", ""), extra_index]
    said |= {"index-url": index} if index else {}
    said |= {"extra-index-url": " ".join(filter(None, extra))} if any(extra) else {}
    said |= {"cert": "/run/secrets/ca"} if certificates else {}
    lines = ["[global]", *(f"{key} = {value}" for key, value in said.items())]
    artifacts.write_whole(directory / "pip.conf", "\n".join(lines) + "\n", mode=0o600)
    secrets = ["--secret", f"id=pip,src={directory / 'pip.conf'}"]
    return [*secrets, "--secret", f"id=ca,src={certificates}"] if certificates else secrets


def _tool() -> str:
    """Choose docker if its daemon answers, else buildah; EDL_BUILDER overrides this.

    Raises:
        EdlError: neither can be used.
    """
    wanted = os.environ.get("EDL_BUILDER", "")
    if wanted and wanted not in TOOLS:
        raise EdlError(f"EDL_BUILDER: invalid value {wanted!r} (expected {' or '.join(TOOLS)})")
    why = "docker is not installed"
    if wanted in ("", "docker") and shutil.which("docker"):
        done = subprocess.run(["docker", "buildx", "ls"], capture_output=True, text=True)
        if done.returncode == 0:
            done = subprocess.run(["docker", "info"], capture_output=True, text=True)
        if done.returncode == 0:
            return "docker"
        why = f"docker is not usable ({(done.stderr.strip() or 'no daemon').splitlines()[-1]})"
    if wanted in ("", "buildah") and shutil.which("buildah"):
        return "buildah"
    missing = {"docker": why, "buildah": "buildah is not installed"}
    reasons = [missing[wanted]] if wanted else list(missing.values())
    raise EdlError(f"docker or buildah is needed to build and push images: {'; '.join(reasons)}")


def _run(tool: str, command: list[str], failed: str) -> None:
    """Run a command and show its output.

    Raises:
        EdlError: the command failed.
    """
    print(f"{' '.join(command)}", flush=True)
    code = subprocess.call(command)
    if code:
        raise EdlError(f"{tool} failed with exit code {code}; {failed}")


def _split(image: str) -> tuple[str, str]:
    """Split an image into repository and tag; a colon before the last slash separates a port."""
    repository, colon, tag = image.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (image, "latest")
