"""Talking to a running master, as `edl run` and the commands about a local job do."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil

from edl.contract import artifacts
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.errors import EdlError

SECONDS = 5.0


class Client:
    """One master's callers' side.

    Raises (every method):
        EdlError: the master cannot be reached, or refuses; the text says which.
    """

    def __init__(self, contact: artifacts.Contact):
        self._contact = contact
        self._channel = grpc.insecure_channel(contact.address)
        self._stub = rpc.MasterStub(self._channel)
        self._metadata = (("authorization", f"Bearer {contact.token}"),)

    def status(self) -> dict[str, Any]:
        """The job now."""
        with self._in_words():
            call = self._stub.Watch(pb.WatchRequest(), metadata=self._metadata, timeout=SECONDS)
            return dict(json.loads(next(iter(call)).json))
        raise AssertionError

    def follow(self, seconds: float | None = None) -> Iterator[dict[str, Any]]:
        """The job at each change, until the master ends or the time is up."""
        call = self._stub.Watch(pb.WatchRequest(follow=True), metadata=self._metadata, timeout=seconds)
        with contextlib.suppress(grpc.RpcError):
            for status in call:
                yield json.loads(status.json)

    def scale(self, workers: int) -> str:
        with self._in_words():
            request = pb.ScaleRequest(workers=workers)
            return str(self._stub.Scale(request, metadata=self._metadata, timeout=SECONDS).text)
        raise AssertionError

    def stop(self, why: str) -> str:
        with self._in_words():
            request = pb.StopRequest(why=why)
            return str(self._stub.Stop(request, metadata=self._metadata, timeout=SECONDS).text)
        raise AssertionError

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                where = self._contact.address
                raise EdlError(f"no master answers at {where}: it died, or is out of reach") from error
            raise EdlError(error.details() or str(error.code())) from error


def _pointer() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "edl" / "latest"


def remember(output: Path) -> None:
    """Let `edl status` without a directory mean this job."""
    with contextlib.suppress(OSError):  # a convenience: a read-only home must not stop a job
        _pointer().parent.mkdir(parents=True, exist_ok=True)
        artifacts.write_whole(_pointer(), f"{output.resolve()}\n")


def is_orphaned(output: Path) -> bool:
    """Whether the directory holds a job that has not ended, and whose master is gone."""
    if not (output / artifacts.JOURNAL).exists() or (output / artifacts.SUMMARY).exists():
        return False
    try:
        return not psutil.pid_exists(artifacts.read_contact(output).pid)
    except EdlError:
        return True


def find(output: Path | None) -> Path:
    """The output directory that a command is about: `output`, else that of the job started last.

    Raises:
        EdlError: no job has been started yet.
    """
    if output is not None:
        return output
    try:
        return Path(_pointer().read_text(encoding="utf-8").strip())
    except OSError:
        raise EdlError(
            "no job has been started on this machine; start one with `edl run MODEL`, "
            "or give an output directory or --release"
        ) from None
