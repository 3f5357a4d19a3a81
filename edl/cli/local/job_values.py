# SPDX-License-Identifier: Apache-2.0
"""The values of a job on this machine: what the user gave, completed and checked before anything starts."""

from __future__ import annotations

import contextlib
import functools
import glob
import inspect
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from edl import config
from edl.checkpoints import CheckpointError, Store, check_values, one_of
from edl.checkpoints.foreign import foreign_files
from edl.checkpoints.keras_files import is_keras_file
from edl.cli import completion
from edl.cli.local.latest import VALUES
from edl.cli.shared.groups import with_parameters
from edl.config import values
from edl.contract import artifacts
from edl.errors import ConfigError, EdlError

LOCAL_SECONDS = (
    120  # checkpoint.seconds of a job with checkpoints in its output directory: docs/checkpoints.md
)
LOCAL_KEPT = 2  # its checkpoint.keep: if the newest one is damaged, the one before it remains


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The model: a name from `edl zoo list`, a dotted module, or a Python file.",
        autocompletion=completion.models,
    ),
]


class Given:
    """The values that the user has given to a command, by the options of a command that `takes_values`."""

    def __init__(
        self,
        values_files: Annotated[
            list[Path],
            typer.Option(
                "-f", "--values", help="A values file; repeatable, merged in order; -: standard input."
            ),
        ] = [],  # noqa: B006
        sets: Annotated[
            list[str],
            typer.Option(
                "--set",
                help="Set values, as with Helm; repeatable: --set workers=3,training.epochs=5",
                autocompletion=completion.keys,
            ),
        ] = [],  # noqa: B006
        set_strings: Annotated[
            list[str], typer.Option("--set-string", help="Like --set, but values are always strings.")
        ] = [],  # noqa: B006
        set_files: Annotated[
            list[str],
            typer.Option("--set-file", help="Like --set, with the text of a file: --set-file key=PATH"),
        ] = [],  # noqa: B006
        workers: Annotated[int | None, typer.Option(help="Short for --set workers=N.")] = None,
        epochs: Annotated[int | None, typer.Option(help="Short for --set training.epochs=N.")] = None,
        batch_size: Annotated[int | None, typer.Option(help="Short for --set training.batchSize=N.")] = None,
        deterministic: Annotated[
            bool, typer.Option("--deterministic", help="Short for --set training.deterministic=true.")
        ] = False,
    ):
        short: dict[str, int | str | None] = {
            "workers": workers,
            "training.epochs": epochs,
            "training.batchSize": batch_size,
            "training.deterministic": "true" if deterministic else None,
        }
        self._sets = [*sets, *(f"{key}={value}" for key, value in short.items() if value is not None)]
        self._files, self._strings, self._texts = values_files, set_strings, set_files

    def load(self, resume: Path | None = None, force: bool = False) -> dict[str, Any]:
        """Return these values; with `resume`, on top of the values of that job.

        Raises:
            ConfigError: `force` without `resume`, or the values cannot be read.
        """
        if force and resume is None:
            raise ConfigError("--force: only valid with --resume")
        files, sets = self._files, self._sets
        if resume is not None:
            files = [values_of(resume), *files]
            sets = [*sets, f"checkpoint.resume=true,checkpoint.force={str(force).lower()}"]
        return values.given(files, sets, self._strings, self._texts)


def takes_values(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `given` of a command by the options with which values are given."""
    options = inspect.signature(Given, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters

    @functools.wraps(command)
    def run(**entered: Any) -> None:
        command(given=Given(**{name: entered.pop(name) for name in options}), **entered)

    return with_parameters(run, [*options.values(), *(p for p in own.values() if p.name != "given")])


def complete(
    given: dict[str, Any], model: str, script: str = "", arguments: Sequence[str] = ()
) -> tuple[dict[str, Any], config.Config]:
    """Return the values of a job on this machine, with absolute paths, and their typed form.

    Raises:
        ConfigError: the values are invalid.
    """
    merged = values.merge(values.defaults(), given)
    if script:
        own = {"script": str(Path(script).resolve()), "arguments": list(arguments), "source": ""}
        merged = values.merge(merged, {"model": own})
    if model:
        merged = values.merge(merged, {"model": {"module": model, "source": ""}})
    typed = config.parse(merged)
    paths = {("checkpoint", "dir"): typed.checkpoint.dir, ("initFrom", "path"): typed.init_from.path}
    paths |= {("data", split): address for split, address in typed.data.addresses.items()}
    for (section, key), path in paths.items():
        if path and "://" not in path:
            # Absolute, because `edl run --resume` may be called in a different directory.
            merged = values.merge(merged, {section: {key: str(Path(path).resolve())}})
    typed = config.parse(merged)
    return merged, typed


def check_addresses(typed: config.Config) -> None:
    """Check that the local files of data.train and the like exist.

    Raises:
        ConfigError: one does not exist, or no file matches a pattern.
    """
    for split, address in typed.data.addresses.items():
        if "://" not in address and not Path(address).exists() and not glob.glob(address, recursive=True):
            what = "no file matches" if glob.has_magic(address) else "no such file or directory:"
            raise ConfigError(f"data.{split}: {what} {address}")


def values_of(output: Path) -> Path:
    """Return the values file of a job to resume.

    Raises:
        ConfigError: the directory holds no job.
        EdlError: the job still runs.
    """
    path = output / VALUES
    if not path.exists():
        raise ConfigError(f"--resume {output}: not the output directory of a job ({VALUES} not found)")
    try:
        os.close(artifacts.lock(output))
    except EdlError:
        raise EdlError(f"--resume {output}: the job still runs; end it with `edl stop {output}`") from None
    except OSError:  # the directory cannot be written, so no master runs there
        pass
    return path


def check_checkpoints(typed: config.Config, resume: Path | None) -> None:
    """Check before the start what every worker would check.

    Raises:
        ConfigError: no checkpoint to resume from exists, or the checkpoints belong to a different job.
    """
    where = typed.checkpoint.dir
    found = Store.open(where).checkpoints() if where else []
    if newest := next((c for c in reversed(found) if not c.wrong()), None):
        check_values(where, newest.manifest, typed, "")
    elif resume is not None and typed.trains:  # a prediction job resumes from its own output
        why = f"{where} holds no whole checkpoint" if where else "the job wrote none: checkpoint.dir is empty"
        raise ConfigError(f"--resume {resume}: no checkpoint to resume from: {why}")
    elif source := typed.init_from.path:
        try:
            if not is_keras_file(source):
                foreign_files(source) or one_of(source)
            elif "://" not in source and not Path(source).is_file():
                raise ConfigError(f"{source}: no such file")
        except (CheckpointError, ConfigError) as error:
            raise ConfigError(f"initFrom.path: {error}") from error


def has_checkpoint(output: Path) -> bool:
    """Return whether the job of this output directory has written a complete checkpoint."""
    with contextlib.suppress(EdlError, OSError, ValueError):
        where = json.loads((output / VALUES).read_text())["checkpoint"]["dir"]
        return bool(where) and any(not found.wrong() for found in Store.open(where).checkpoints())
    return False


def local_checkpoints(output: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return values with which a job writes checkpoints to its output directory; {} if a user gave a place.

    Args:
        given: the values under `checkpoint` that the user gave; with an empty dir, the job writes none.
    """
    if "dir" in given:
        return {}
    where = str((output / artifacts.CHECKPOINTS).resolve())
    ours = {"dir": where, "seconds": LOCAL_SECONDS, "keep": LOCAL_KEPT}
    return {"checkpoint": {key: value for key, value in ours.items() if key not in given}}
