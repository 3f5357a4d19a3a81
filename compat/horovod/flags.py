# SPDX-License-Identifier: Apache-2.0
"""The flags of horovodrun, as `edl horovod` understands them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from edl.errors import ConfigError

LEGACY_KERAS = "TF_USE_LEGACY_KERAS"  # TensorFlow then takes tf-keras as `tf.keras`
VERSION = "0.28.1"  # of Horovod
BUILD = f"""Horovod v{VERSION}, patched by edl:

Frameworks
    [X] TensorFlow    [ ] PyTorch    [ ] MXNet
Controllers
    [X] Gloo          [ ] MPI
Tensor operations
    [X] Gloo          [ ] MPI        [ ] CCL
    NCCL in images that were built for GPUs"""
LOCAL = frozenset({"localhost", "127.0.0.1"})
_MPI = "edl's Horovod is built without MPI"
_SSH = "workers on other machines are pods: helm install with mode=horovod"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_OWN_LOG = "each worker has a log of its own: edl logs"
DISCOVERY = "--host-discovery-script"
_NO_SSH = "edl does not connect to hosts by ssh"
# Flags that cannot be honoured, with the reason.
REFUSED = {
    "--mpi": _MPI,
    "--jsrun": _MPI,
    "--mpi-args": _MPI,
    "--mpi-threads-disable": _MPI,
    "--no-mpi-threads-disable": _MPI,
    "--tcp": _MPI,
    "--binding-args": _MPI,
    "-hostfile": _SSH,
    "--hostfile": _SSH,
    "--reset-limit": "edl counts failures, not ring changes: --set elastic.maxFailures=N",
    "--config-file": "use flags, or --values FILE with values of edl",
    "--spark": "workers are started by edl, not by Spark",
    "--ray": "workers are started by edl, not by Ray",
}
# Flags without an effect: how many values each takes, and the line that says why.
IGNORED = {
    "-p": (1, _NO_SSH),
    "--ssh-port": (1, _NO_SSH),
    "-i": (1, _NO_SSH),
    "--ssh-identity-file": (1, _NO_SSH),
    "--disable-cache": (0, _NO_SSH),
    DISCOVERY: (1, "`edl scale N` sets the number of workers, and in a cluster pods are the hosts"),
    "--slots-per-host": (1, "-np sets the number of workers"),
    "--blacklist-cooldown-range": (2, "edl has no list of bad hosts: it replaces lost workers"),
    "--elastic-timeout": (
        1,
        "edl waits for --min-np workers; --set activeDeadlineSeconds=N limits the whole job",
    ),
    "-prefix-timestamp": (0, _OWN_LOG),
    "--prefix-output-with-timestamp": (0, _OWN_LOG),
}
# Flags with a value, and flags without, that set a variable of Horovod's engine.
VALUES = {
    "--cycle-time-ms": "HOROVOD_CYCLE_TIME",
    "--cache-capacity": "HOROVOD_CACHE_CAPACITY",
    "--autotune-log-file": "HOROVOD_AUTOTUNE_LOG",
    "--autotune-warmup-samples": "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "--autotune-steps-per-sample": "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "--autotune-bayes-opt-max-samples": "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "--autotune-gaussian-process-noise": "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    "--timeline-filename": "HOROVOD_TIMELINE",
    "--stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "--stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "--num-nccl-streams": "HOROVOD_NUM_NCCL_STREAMS",
    "--thread-affinity": "HOROVOD_THREAD_AFFINITY",
    "--gloo-timeout-seconds": "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "--log-level": "HOROVOD_LOG_LEVEL",
    "--network-interface": "EDL_RING_INTERFACE",
    "--network-interfaces": "EDL_RING_INTERFACE",
}
SWITCHES = {
    "--hierarchical-allreduce": ("HOROVOD_HIERARCHICAL_ALLREDUCE", "1"),
    "--no-hierarchical-allreduce": ("HOROVOD_HIERARCHICAL_ALLREDUCE", "0"),
    "--hierarchical-allgather": ("HOROVOD_HIERARCHICAL_ALLGATHER", "1"),
    "--no-hierarchical-allgather": ("HOROVOD_HIERARCHICAL_ALLGATHER", "0"),
    "--torus-allreduce": ("HOROVOD_TORUS_ALLREDUCE", "1"),
    "--no-torus-allreduce": ("HOROVOD_TORUS_ALLREDUCE", "0"),
    "--autotune": ("HOROVOD_AUTOTUNE", "1"),
    "--no-autotune": ("HOROVOD_AUTOTUNE", "0"),
    "--timeline-mark-cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", "1"),
    "--no-timeline-mark-cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", "0"),
    "--no-stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "1"),
    "--stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "0"),
    "--log-with-timestamp": ("HOROVOD_LOG_HIDE_TIME", "0"),
    "--log-without-timestamp": ("HOROVOD_LOG_HIDE_TIME", "1"),
    "--no-log-hide-timestamp": ("HOROVOD_LOG_HIDE_TIME", "0"),
    "--log-hide-timestamp": ("HOROVOD_LOG_HIDE_TIME", "1"),
    "--legacy-keras": (LEGACY_KERAS, "1"),
}


@dataclass(frozen=True)
class Call:
    """What a command line asks for.

    Args:
        says: a text to print instead of running a script; empty: run the script.
        script, arguments: the script, or the name of a module to run as `python -m` does, and its arguments.
        is_module: whether `script` is the name of a module.
        environment: variables for the workers.
        files, sets: values files and settings of edl. The flags are the first settings.
        output: the output directory; None for a new one.
        notes: flags that were ignored, with the reason, a line for each.
        all_output: whether the lines of all workers are shown, and not only those of rank 0.
    """

    says: str = ""
    script: str = ""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    sets: tuple[str, ...] = ()
    output: Path | None = None
    notes: tuple[str, ...] = ()
    all_output: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"edl horovod: {message}")


class _Refuse(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise ConfigError(f"edl horovod {option_string}: {REFUSED[str(option_string)]}")


class _Ignore(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        note = f"edl horovod {option_string} is ignored: {IGNORED[str(option_string)][1]}"
        namespace.notes = (*namespace.notes, note)
        namespace.discovers |= option_string == DISCOVERY


class _Switch(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        variable, value = SWITCHES[str(option_string)]
        namespace.environment = namespace.environment | {variable: value}


class _Value(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.environment = namespace.environment | {VALUES[str(option_string)]: str(values)}


class _Export(argparse.Action):
    """mpirun's flag, which users of horovodrun know. Workers have the variables of this process anyway."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name, equals, value = str(values).partition("=")
        if equals:
            namespace.environment = namespace.environment | {name: value}


def parse(line: Sequence[str]) -> Call:
    """Parse horovodrun's flags, the script and its arguments.

    Raises:
        ConfigError: a flag is unknown or cannot be honoured, or the script is missing.
    """
    parser = _Parser(prog="edl horovod", allow_abbrev=False, add_help=False)
    parser.set_defaults(environment={}, notes=(), discovers=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-v", "--version", action="store_true")
    parser.add_argument("-cb", "--check-build", action="store_true")
    parser.add_argument("-np", "--num-proc", "--workers", type=_number, dest="np")
    parser.add_argument("--min-np", "--min-num-proc", type=_number)
    parser.add_argument("--max-np", "--max-num-proc", type=_number)
    parser.add_argument("-H", "--hosts", default="")
    parser.add_argument("--start-timeout", type=_number)
    parser.add_argument("--fusion-threshold-mb", type=_number)
    parser.add_argument("--output-filename", "--output", type=Path)
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--all-output", action="store_true")
    parser.add_argument("--values", "-f", type=Path, action="append", default=[])
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument(*REFUSED, action=_Refuse, nargs="?", dest="refused")
    for flag, (count, _) in IGNORED.items():
        parser.add_argument(flag, action=_Ignore, nargs=count, dest="ignored")
    parser.add_argument(*VALUES, action=_Value, dest="value")
    parser.add_argument(*SWITCHES, action=_Switch, nargs=0, dest="switch")
    parser.add_argument("-x", action=_Export, dest="export")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    found = parser.parse_args([*line])
    if found.version or found.check_build or found.help:
        return Call(says=HELP if found.help else BUILD if found.check_build else VERSION)
    command, assigned = _without_env(found.command)
    script, arguments, is_module = _script(command)
    environment = found.environment | assigned
    if found.fusion_threshold_mb is not None:
        environment["HOROVOD_FUSION_THRESHOLD"] = str(found.fusion_threshold_mb << 20)
    return Call(
        script=script,
        arguments=arguments,
        is_module=is_module,
        environment=environment,
        files=tuple(found.values),
        sets=(*_settings(found), *found.set),
        output=found.output_filename,
        notes=found.notes,
        all_output=found.all_output,
    )


HELP = """edl horovod -np N [FLAGS] [NAME=VALUE ...] script.py [ARGS]
edl horovod -np N [FLAGS] [NAME=VALUE ...] python -m MODULE [ARGS]

Run a script that was written for Horovod, with horovodrun's flags. Those that
edl cannot honour are refused, those without an effect ignored, with the reason.

  -np N, --workers N        workers
  --min-np N, --max-np N    the script uses hvd.elastic: workers may come and go
  --start-timeout SECONDS   until a worker is in hvd.init() or hvd.elastic.run
  --output-filename DIR     the output directory, with a log of each worker
  --all-output              show the lines of all workers, not only of rank 0
  --set KEY=VALUE, -f FILE  values of edl; repeatable
  -x NAME=VALUE             a variable for the workers, beside the shell's own
  --legacy-keras            tf.keras is Keras 2, from the package tf-keras
  --check-build, --version  what edl's Horovod has"""


def _number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number, at least 1")
    return number


def _settings(found: argparse.Namespace) -> list[str]:
    elastic = found.discovers or found.min_np is not None or found.max_np is not None
    workers = found.np or found.max_np or found.min_np
    if workers is None:
        raise ConfigError("edl horovod: -np is missing: the number of workers")
    smallest = (found.min_np or workers) if elastic else workers
    largest = (found.max_np or workers) if elastic else workers
    if not smallest <= workers <= largest:
        raise ConfigError(
            f"edl horovod -np {workers}: expected {smallest} (--min-np) to {largest} (--max-np)"
        )
    hosts = [host.partition(":") for host in found.hosts.split(",") if host]
    for name, _, slots in hosts:
        if name not in LOCAL:
            raise ConfigError(f"edl horovod -H {name}: {_SSH}")
        if slots and not slots.isdigit():
            raise ConfigError(f"edl horovod -H {name}:{slots}: expected HOST:SLOTS")
    slots_here = sum(int(slots or 1) for _, _, slots in hosts)
    if hosts and workers > slots_here:
        raise ConfigError(f"edl horovod -np {workers}: -H has {slots_here} slots")
    settings = [f"workers={workers}", f"minWorkers={smallest}", f"maxWorkers={largest}"]
    settings += ["mode=horovod", f"horovod.elastic={str(elastic).lower()}"]
    if found.start_timeout is not None:
        settings.append(f"elastic.startupTimeoutSeconds={found.start_timeout}")
    if found.verbose:
        settings.append("logLevel=debug")
    return settings


def _without_env(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command without `--`, `env` and assignments before it, and the variables that these set."""
    rest, assigned = [*command], dict[str, str]()
    if rest and rest[0] == "--":
        del rest[0]
    if rest and Path(rest[0]).name == "env":
        del rest[0]
    while rest and _ASSIGNMENT.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        assigned[name] = value
    return rest, assigned


def _script(command: Sequence[str]) -> tuple[str, tuple[str, ...], bool]:
    """The script and its arguments, without the interpreter that horovodrun needs.

    The last value is whether the script is a module, run by `python -m`.

    Raises:
        ConfigError: the command runs something else.
    """
    rest = [*command]
    runs_python = bool(rest) and Path(rest[0]).name.startswith("python")
    if runs_python:
        del rest[0]
        while rest and rest[0] in ("-u", "-O", "-B"):
            del rest[0]
        if len(rest) > 1 and rest[0] == "-m":
            return rest[1], tuple(rest[2:]), True
    if not rest or rest[0].startswith("-") or not (runs_python or rest[0].endswith(".py")):
        found = f", found {' '.join(command)}" if command else ""
        raise ConfigError(
            "edl horovod: expected a Python script or module: edl horovod -np 2 train.py, or "
            f"edl horovod -np 2 python -m package.train{found}"
        )
    return rest[0], tuple(rest[1:]), False
