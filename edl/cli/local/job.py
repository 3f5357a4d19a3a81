# SPDX-License-Identifier: Apache-2.0
"""A job on this machine, found by its output directory."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from edl import config
from edl.cli.local import latest
from edl.cli.local.process_faults import ProcessFaults
from edl.cli.shared import received
from edl.cli.shared.jobs import (
    ENDED,
    NO_STATUS,
    JobSnapshot,
    Journal,
    LogSource,
    Phase,
    stop_failure,
    unsaved,
)
from edl.config import values
from edl.contract import artifacts
from edl.errors import ConfigError, EdlError
from edl.net.master_client import Client


class Local:
    """A job on this machine.

    Args:
        output: its job directory; None: as in `latest.find`.
        scope: where to look for a job if `output` is None.
    """

    def __init__(self, output: Path | None, scope: latest.Scope = latest.Scope.MACHINE):
        self._output, self._announced = latest.find(output, scope), output is None

    def snapshot(self) -> JobSnapshot:
        summary = self._summary()
        data = summary if summary is not None else self._client().status()
        name = summary["model"] if summary is not None else ""
        model = str(self._output / (name or artifacts.MODEL))
        return JobSnapshot(data, str(self._output), model, self._left(data, model), self._given())

    def _given(self) -> str:
        """The model as the user has given it; "" if the values cannot be read."""
        with suppress(EdlError, OSError):
            return config.parse(values.load([self._output / latest.VALUES])).model.name
        return ""

    def announce(self) -> None:
        if self._summary() is None:
            self._client()  # refuses a directory that is not a job's
        if not self._announced:
            latest.announce(self._output)

    def unsaved(self) -> str:
        return unsaved(self._client().status()) if self._summary() is None else ""

    def _left(self, data: dict[str, Any], model: str) -> tuple[str, ...]:
        """Describe the results that the job will write, and their location."""
        match data.get("task", {}).get("kind", "train"):
            case "evaluate":
                return ()
            case "predict":
                return (f"predictions: {data.get('predictions') or self._output / artifacts.PREDICTIONS}",)
        if self._runs_script():
            saved = latest.others(self._output)
            return (f"saved by the script: {saved}",) if saved else ()
        return (f"model: {model}, once the job succeeds",) if data["phase"] not in ENDED else ()

    def _runs_script(self) -> bool:
        with suppress(EdlError, OSError):
            return bool(config.parse(values.load([self._output / latest.VALUES])).model.script)
        return False

    def wait(self, phase: Phase, seconds: float | None) -> tuple[str, str]:
        deadline = time.monotonic() + seconds if seconds is not None else None
        last = str(Phase.Starting), NO_STATUS
        if self._summary() is None:
            for status in self._client().follow(seconds):
                last = status["phase"], status["reason"]
                if last[0] == phase:
                    return last
        if (summary := self._summary()) is not None:
            return summary["phase"], summary["reason"]
        if deadline is not None and time.monotonic() >= deadline:
            return last
        raise EdlError(f"{self._output}: the master exited without writing {artifacts.SUMMARY}")

    def until(self, reached: Callable[[dict[str, Any]], bool], seconds: float | None) -> bool:
        return self._summary() is None and any(map(reached, self._client().follow(seconds)))

    def faults(self) -> ProcessFaults:
        if (summary := self._summary()) is not None:
            raise EdlError(f"{self._output}: the job has ended: {summary['phase']}")
        return ProcessFaults(self._output)

    def logs(self, source: LogSource, tail: int | None, follow: bool) -> Generator[str, None, None]:
        logs: dict[Path, _Log] = {}

        def news() -> Iterator[str]:
            for path in sorted(self._logs(source), key=_seniority):
                for line in logs.setdefault(path, _Log(path, tail)).news():
                    yield f"{path.stem}: {line}"

        yield from news()
        if not logs and self._summary() is not None:
            raise EdlError(f"{self._output / artifacts.LOGS}: no log of {source.name} found")
        if follow and self._summary() is None:
            for _ in self._client().follow():  # a worker that logs also sends heartbeats
                yield from news()
            yield from news()

    def scale(self, workers: int | None, servers: int | None = None) -> str:
        if (summary := self._summary()) is not None:
            raise EdlError(f"{self._output}: the job has ended: {summary['phase']}")
        return self._client().scale(workers, servers)

    def checkpoint(self) -> str:
        if (summary := self._summary()) is not None:
            raise EdlError(f"{self._output}: the job has ended: {summary['phase']}")
        return self._client().checkpoint()

    def fetch(self, name: str, target: Path) -> str:
        if self._summary() is None:
            raise EdlError(
                f"{self._output}: the job has not ended; `edl model export` writes its model as it is now"
            )
        with suppress(ConfigError, OSError):  # jobs of other versions
            script = config.parse(values.load([self._output / latest.VALUES])).model.script
            received.refuse_script(script, self._output)
        files = received.listed(received.read_list(self._output), name, self._output)
        with received.receiving(target) as made:
            for file, about in files.items():
                with open(self._output / file, "rb") as source, made.file(file, about) as write:
                    while piece := source.read(received.PIECE):
                        write(piece)
        return made.outcome

    def audit(self) -> str:
        from edl.cli.shared.proof import prove  # needs NumPy, which the master's image does not have

        return prove(self._output)

    def journal(self) -> AbstractContextManager[Journal]:
        return nullcontext(Journal(self._output, self._output.resolve().name, self._told()))

    def _told(self) -> dict[str, Any]:
        """The summary of the job, or its status; a status without details if the master does not answer."""
        if (summary := self._summary()) is not None:
            return summary
        try:
            return self._client().status()
        except EdlError:
            return {"phase": "unknown", "reason": f"no {artifacts.SUMMARY}, and the master does not answer"}

    def token(self) -> str:
        return artifacts.read_contact(self._output).token

    def authority(self) -> str:
        return artifacts.read_contact(self._output).ca

    def stop(self, discard: bool, seconds: float) -> str:
        if (summary := self._summary()) is not None:
            return f"the job has already ended: {summary['phase']}, {summary['reason']}"
        keeps = not discard and self._client().status().get("checkpoint") is not None
        return self._client().stop("stopped by edl stop", checkpoint=keeps, force=True)

    def stop_with_checkpoint(self, force: bool, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        last = str(Phase.Starting), NO_STATUS
        if self._summary() is None:
            asked = secrets.token_hex(4)
            self._client().stop("stopped by edl stop", checkpoint=True, force=force, id=asked)
            for status in self._client().follow(seconds):
                last = status["phase"], status["reason"]
                if last[0] in (*ENDED, Phase.Ending):
                    return f"the job is ending: {last[1]}"
                if why := stop_failure(status, asked):
                    raise EdlError(why)
            if time.monotonic() >= deadline:
                raise TimeoutError("{}, {}".format(*last))
        return "the job has ended: {}, {}".format(*self.wait(Phase.Stopped, None))

    def _logs(self, source: LogSource) -> Iterator[Path]:
        for component in source.components:
            name = component if source.number is None else f"{component}-{source.number}"
            pattern = name if component == "master" or source.number is not None else f"{name}-*"
            yield from (self._output / artifacts.LOGS).glob(f"{pattern}.log")

    def _summary(self) -> dict[str, Any] | None:
        """The summary of the job; None while the job runs.

        Raises:
            EdlError: the output directory or its summary cannot be read.
        """
        return artifacts.read_summary(self._output) if artifacts.has_ended(self._output) else None

    def _client(self) -> Client:
        return Client(artifacts.read_contact(self._output))


def _seniority(path: Path) -> tuple[bool, str, int]:
    """Sort key of logs: the master first, then the servers, then the workers, by number."""
    component, _, number = path.stem.rpartition("-")
    return path.stem != "master", component, int(number) if number.isdecimal() else 0


class _Log:
    """A growing log file."""

    def __init__(self, path: Path, tail: int | None):
        self._file, self._tail, self._rest = open(path, "rb"), tail, b""

    def news(self) -> list[str]:
        """The complete lines since the last call."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        if self._tail is not None:
            lines, self._tail = lines[max(len(lines) - self._tail, 0) :], None
        return [line.decode(errors="replace") for line in lines]
