# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench keras3`: which way trains one Keras 3 model with two workers, on today's wheels?

Each way of benchmarks/keras3_ways/ is a script as its own guide has it. A way trains if all of its workers
end without an error; else the last line of its error is printed. TensorFlow and Keras are those of
requirements.lock, but for stock Horovod, which compiles with TensorFlow 2.18 at most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import environments
from benchmarks.recorder import Recorder
from benchmarks.report import say

WAYS = Path(__file__).with_name("keras3_ways")
WORKERS, SECONDS = 2, 180.0  # and how long a way may take
MAX_LETTERS = 200  # of an error
LAUNCHERS = ("Horovod detected that", "WorkerGroupError")  # begin what a launcher adds to an error


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        environment: of `benchmarks.environments`.
        script: in WAYS.
        launcher: its arguments before the script; empty: each worker is started with its TF_CONFIG.
        packages: whose versions are printed.
        variables: of the environment.
    """

    environment: str
    script: str
    launcher: tuple[str, ...]
    packages: tuple[str, ...] = ("tensorflow-cpu", "keras")
    variables: tuple[tuple[str, str], ...] = ()


TRAIN = ("run", "--workers", str(WORKERS), "--epochs", "2", "--batch-size", "64", "--output", "{output}")
HOROVOD = ("horovodrun", "--gloo", "-np", str(WORKERS), "--network-interfaces", "lo", "python")
TENSORFLOW_BACKEND = (("KERAS_BACKEND", "tensorflow"),)
ALL = {
    "edl": Way("edl", "the_model.py", ("edl", *TRAIN), ("edl-trainer", "tensorflow-cpu", "keras")),
    "MultiWorkerMirroredStrategy with fit": Way("edl", "multi_worker_mirrored.py", ()),
    "keras.distribution.initialize": Way("edl", "keras_distribution.py", (), variables=TENSORFLOW_BACKEND),
    "Ray TensorflowTrainer": Way("ray", "ray_tensorflow.py", ("python",), ("ray", "tensorflow-cpu", "keras")),
    "stock Horovod with fit": Way(
        "horovod", "horovod_keras.py", HOROVOD, ("horovod", "tensorflow-cpu", "keras")
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a way: whether all workers trained, after how many seconds, and its error."""

    trains: bool
    seconds: float
    error: str
    versions: dict[str, str]


def attempt(way: Way, directory: Path) -> Outcome:
    """Start all workers of a way, and wait for their ends."""
    python = environments.python(way.environment)
    binaries = Path(python).parent
    began = time.monotonic()
    commands: list[list[str]] = []
    tf_configs: list[str] = []
    if way.launcher:
        words = [word.format(output=directory / "job") for word in way.launcher]
        script = "./the_model.py" if words[0] == "edl" else way.script
        order = [words[0], words[1], script, *words[2:]] if words[0] == "edl" else [*words, script]
        commands, tf_configs = [[str(binaries / order[0]), *order[1:]]], [""]
    else:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(WORKERS)]
        for index in range(WORKERS):
            commands.append([python, way.script])
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            tf_configs.append(json.dumps(config))
    logs = [directory / f"log.{n}" for n in range(len(commands))]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                started(command, log, {**dict(way.variables), "TF_CONFIG": tf_config}, binaries)
            )
            for command, log, tf_config in zip(commands, logs, tf_configs, strict=True)
        ]
        while time.monotonic() < began + SECONDS and any(p.poll() is None for p in processes):
            if any(p.poll() for p in processes):
                time.sleep(2)  # the others may still say why
                break
            time.sleep(0.1)
        trains = all(p.poll() == 0 for p in processes)
    seconds = time.monotonic() - began
    error = "" if trains else error_line("".join(log.read_text(errors="replace") for log in logs), seconds)
    return Outcome(trains, round(seconds, 1), error, environments.versions(way.environment, *way.packages))


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, variables: dict[str, str], binaries: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which ends with the block."""
    environment = {
        **os.environ,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": str(WAYS),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **{name: value for name, value in variables.items() if value},
    }
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, cwd=WAYS, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def error_line(log: str, seconds: float) -> str:
    """The last exception of a log with its first words, else the log's last line."""
    plain = re.sub(r"\x1b\[[0-9;]*m|\[\d+\]<std(?:err|out)>:|\(\w+ pid=[^)]*\) |(?<=\")/\S*/", "", log)
    lines = [line.strip() for line in plain.splitlines()]
    named = [
        n
        for n, line in enumerate(lines)
        if re.match(r"[\w.]*(Error|Exception)\b: \S", line) and not any(word in line for word in LAUNCHERS)
    ]
    last = named[-1] if named else len(lines) - 1
    error = " ".join(" ".join(lines[last : last + 4]).split())[:MAX_LETTERS] if lines else "no output"
    return f"not over after {SECONDS:g} s; {error}" if seconds >= SECONDS else error


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench keras3", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ALL), default=list(ALL), metavar="NAME")
    parser.add_argument("--record", default="", metavar="NAME", help="write benchmarks/records/DATE-NAME/")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    recorder, found = Recorder(args.record), {}
    print("| way | trains | seconds, start included | versions | error |\n| --- | --- | --- | --- | --- |")
    for name in args.only:
        say(name)
        with tempfile.TemporaryDirectory(prefix="edl-bench-") as directory:
            made = attempt(ALL[name], Path(directory))
        found[name] = vars(made)
        told = ", ".join(f"{package} {version}" for package, version in made.versions.items())
        answer = "yes" if made.trains else "NO"
        print(f"| {name} | {answer} | {made.seconds:.0f} | {told} | {made.error} |", flush=True)
        versions = {name: each["versions"] for name, each in found.items()}
        recorder.write({"ways": found}, versions)  # even if the next one fails
    return 0


if __name__ == "__main__":
    sys.exit(main())
