# SPDX-License-Identifier: Apache-2.0
"""Start jobs with `edl run`, watch them, and collect what they leave: used by experiments.py.

KIT_HOME is where build.sh or unpack.sh put everything, OUT the folder of the results.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HOME = Path(os.environ["KIT_HOME"])
OUT = Path(os.environ["OUT"])
JOBS = HOME / "jobs"
TREE = HOME / "small/tree"
HOROVOD = HOME / "small/horovod"  # a folder for each build
EDL = HOME / "environment/bin/edl"
STARTED = time.time()

sys.path.insert(0, str(TREE))
from edl.contract import artifacts  # noqa: E402
from edl.net.master_client import Client  # noqa: E402
from tests.support.jobs.evidence import CRASHES, check_weights  # noqa: E402


def log(*words: object) -> None:
    """Print a line and append it to results.txt."""
    line = f"[{time.time() - STARTED:6.1f}] " + " ".join(map(str, words))
    print(line, flush=True)
    with open(OUT / "results.txt", "a", encoding="utf-8") as file:
        file.write(line + "\n")


def query_gpu(query: str, fields: str) -> list[list[str]]:
    """Return the rows of `nvidia-smi --query-QUERY=FIELDS`, or none if it fails."""
    command = ["nvidia-smi", f"--query-{query}={fields}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [[word.strip() for word in line.split(",")] for line in text.splitlines()]


def environment(build: str, **more: str) -> dict[str, str]:
    """The environment of a process that uses this build of Horovod."""
    return {
        **os.environ,
        "PYTHONPATH": f"{HOROVOD / build}:{TREE}",
        "PYTHONUNBUFFERED": "1",
        "NCCL_DEBUG": "WARN",
        "NCCL_IB_DISABLE": "1",
        **more,
    }


def kill_processes_of(directory: Path) -> None:
    """Kill every process with KIT_JOB=directory in its environment; workers have sessions of their own."""
    marker = f"KIT_JOB={directory}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            pass


def journal(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of all journals below a directory; a last line may be incomplete."""
    for path in sorted(directory.rglob("events*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue


def exits(directory: Path) -> dict[str, int]:
    """Count how workers ended, by signal or exit code, and log why rings were left."""
    how: Counter[str] = Counter()
    why: Counter[str] = Counter()
    for entry in journal(directory):
        event = entry.get("event", {})
        if event.get("type") == "LeftRing":  # numbers and addresses differ each time
            why[re.sub(r"[0-9.:\[\]]+", "#", event.get("broken") or "planned")[:140]] += 1
        if event.get("type") == "Gone":
            how[event.get("signal") or f"code {event.get('code')}"] += 1
    log(f"   {directory.name}: rings were left {dict(why)}")
    return dict(how)


def crashed(ends: dict[str, int]) -> bool:
    """Whether a worker ended in a way that only a crash brings, given what `exits` returned."""
    return bool(CRASHES & set(ends))


def grep_logs(directory: Path, pattern: str, most: int = 5) -> list[str]:
    """Return the matching lines of a job's logs, and log the first ones."""
    found = []
    for path in sorted(directory.rglob("*.log")):
        for line in path.read_text(errors="replace").splitlines():
            if re.search(pattern, line) and "oneDNN" not in line and "broke before" not in line:
                found.append(f"{path.name}: {line[:260]}")
    for line in found[:most]:
        log("   log", line)
    return found


def weights_error(model: Path, records: int, epochs: int) -> str:
    """Return what is wrong with the weights of a saved counting model, or "exact"."""
    if not model.exists():
        return "no model"
    return check_weights(model, records, epochs) or "exact"


class Job:
    """A job of `edl run` in processes of this machine.

    Args:
        name: the job's name, and that of its folder.
        model: a file of models/ or of tests/models without its suffix, or a model of the zoo.
        values: settings, as for `--set`.
        build: the build of Horovod: gloo, nccl or nccl14.
        more: further environment variables.
    """

    def __init__(self, name: str, model: str, values: dict[str, object], build: str, **more: str):
        self.name, self.directory, self.output = name, JOBS / name, JOBS / f"{name}.out"
        shutil.rmtree(self.directory, ignore_errors=True)
        JOBS.mkdir(parents=True, exist_ok=True)
        variables = {"KIT_JOB": str(self.directory), "TF_CPP_MIN_LOG_LEVEL": "1", "EDL_RING_INTERFACE": "lo"}
        self.environment = environment(build, **(variables | more))
        files = (folder / f"{model}.py" for folder in (HERE / "models", TREE / "tests/models"))
        path = next((str(file) for file in files if file.exists()), model)
        command = [str(EDL), "run", path, "--output", str(self.directory)]
        for key, value in values.items():
            command += ["--set", f"{key}={value}"]
        self.began = time.time()
        self.process = subprocess.Popen(
            command,
            stdout=open(self.output, "w", encoding="utf-8"),
            stderr=subprocess.STDOUT,
            env=self.environment,
            cwd=JOBS,
            start_new_session=True,
        )
        self.memory: dict[str, str] = {}  # MiB of GPU memory by process
        self._ended = threading.Event()
        threading.Thread(target=self._sample_memory, daemon=True).start()

    def _sample_memory(self) -> None:
        while not self._ended.wait(1.0) and self.process.poll() is None:
            for row in query_gpu("compute-apps", "pid,used_memory"):
                if len(row) == 2:
                    self.memory[row[0]] = row[1]

    def text(self) -> str:
        """Return what the job has printed so far."""
        return self.output.read_text(errors="replace")

    def until(self, condition: Callable[[], object], seconds: float, pause: float = 0.02) -> bool:
        """Wait until the condition holds; False after `seconds` or when the job has ended without it."""
        deadline = time.time() + seconds
        while time.time() < deadline:
            running = self.process.poll() is None
            if condition():
                return True
            if not running:
                return False
            time.sleep(pause)
        return False

    def wait_for(self, pattern: str, seconds: float) -> float | None:
        """Return the time at which the output matched, or None."""
        matched = self.until(lambda: re.search(pattern, self.text()), seconds, 0.05)
        return time.time() if matched else None

    def status(self) -> dict[str, Any]:
        """Return what `edl status` reports of the job, also after its end; empty if the job is not found."""
        command = [str(EDL), "status", "-o", "json", str(self.directory)]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=20)
        try:
            status: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            return {}
        return status

    def workers(self) -> list[tuple[Any, Any, Any, Any]]:
        """Return (id, pid, rank, state) of each worker."""
        rows = self.status().get("workers", [])
        return [(r.get("id"), r.get("pid"), r.get("rank"), r.get("state")) for r in rows]

    def client(self) -> Client:
        """Connect to the job's master."""
        return Client(artifacts.read_contact(self.directory))

    def worker_of_rank(self, rank: int) -> tuple[int, int]:
        """Return (id, pid) of the worker with this rank, or of any other one."""
        rows = self.workers()
        found = [row for row in rows if row[2] == rank] or rows
        if not found:
            raise RuntimeError("the job has no workers")
        return found[0][0], int(found[0][1])

    def orders_to_form(self, size: int) -> int:
        """Count the master's orders to form a ring of this size."""
        effects = (effect for entry in journal(self.directory) for effect in entry.get("effects", []))
        return sum(e.get("type") == "Form" and len(e.get("members", ())) == size for e in effects)

    def until_ordered(self, size: int, count: int, seconds: float) -> bool:
        """Wait until more than `count` rings of this size were ordered."""
        return self.until(lambda: self.orders_to_form(size) > count, seconds)

    def ring_changes(self) -> list[tuple[str, str]]:
        """Return (sizes, seconds) of each ring change that the job reported."""
        return re.findall(r"ring (\d+ -> \d+) in ([\d.]+) s", self.text())

    def save_stacks(self, when: str) -> None:
        """Save all workers' stacks and the state of their threads; of the first worker native frames too."""
        native = True
        for worker, pid, rank, state in self.workers():
            if not pid:
                continue
            text = _threads(pid)
            for option, seconds in ([], 15), (["--native"], 25):
                if option and not native:
                    continue
                native = native and not option
                command = ["py-spy", "dump", *option, "--pid", str(pid)]
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
                    text += f"\n== {option}\n{done.stdout}{done.stderr}"
                except subprocess.TimeoutExpired:
                    text += f"\n== {option} took more than {seconds} s\n"
            (JOBS / f"{self.name}.stack-{when}-{worker}.txt").write_text(text)
            main = text.partition("MainThread")[2].splitlines()[1:7]
            frames = " < ".join(line.strip() for line in main)[:500]
            log(f"   stack of worker {worker} rank {rank} {state} ({when}):", frames)

    def end(self, seconds: float, lines: int = 6) -> int | str:
        """Wait for the job's end and log how it went; kill it if it takes longer than `seconds`.

        Args:
            lines: how many of the last lines of its output are logged.

        Returns:
            Its exit status, or "no end".
        """
        code: int | str
        try:
            code = self.process.wait(max(0.1, seconds))
        except subprocess.TimeoutExpired:
            code = "no end"
            self._kill()
        self._ended.set()
        log(f"-- {self.name}: exit {code} after {time.time() - self.began:.1f} s; MiB by pid {self.memory}")
        text = self.text()
        for line in re.findall(r"^.*(?:ring \d+ -> \d+|is lost|exited|failed|differ).*$", text, re.M)[:14]:
            log("   |", line[:200])
        for line in [line for line in text.splitlines() if line.strip()][-lines:]:
            log("   >", line[:220])
        if self.directory.exists():
            command = [str(EDL), "audit", str(self.directory)]
            done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=30)
            last = " / ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
            log("   audit:", done.returncode, last[:300])
        return code

    def _kill(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(4)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
        kill_processes_of(self.directory)


def _threads(pid: int) -> str:
    """State and CPU time (in hundredths of a second) of a process's threads: shows which of them spin."""
    text = ""
    for path in Path(f"/proc/{pid}/task").glob("*"):
        try:
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            name, waits_in = (path / "comm").read_text().strip(), (path / "wchan").read_text()
        except OSError:  # the thread has ended
            continue
        text += f"{path.name} {name} {waits_in} {stat[0]} {stat[11]} {stat[12]}\n"
    return text


def save_logs() -> None:
    """Pack the outputs, logs, journals and stacks of all jobs into logs.tgz."""
    kinds = (".out", ".log", ".txt", ".json", ".jsonl")
    files = (path for path in JOBS.rglob("*") if path.suffix in kinds and path.is_file())
    names = sorted(str(path.relative_to(JOBS)) for path in files if path.stat().st_size < 3_000_000)
    command = ["tar", "czf", str(OUT / "logs.tgz"), "-C", str(JOBS), "-T", "-"]
    subprocess.run(command, input="\n".join(names), text=True, check=False)  # a job may still write
