# SPDX-License-Identifier: Apache-2.0
"""Temporary directories go with their processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edl import scratch
from edl.contract.ids import WorkerId
from edl.master.backends.launchers import Spawn
from edl.master.backends.processes import Processes
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.trainer.model import user_model

IN_SYNC = """
import os, sys
from edl import scratch
kept = scratch.of_this_process()
with scratch.directory() as path:
    (path / "file").touch()
    print(path, flush=True)
    {ending}
"""

# Writes the file `model`, or a directory of this name, beside which a killed writer may leave nothing.
WRITERS = {
    "text": "from edl.contract import artifacts; artifacts.write_whole(target, 'text')",
    "index": "from edl.data.files import index_file; index_file._store(target, b'head', b'index')",
    "checkpoint": """
from edl.checkpoints.files import Files
assert Files(target.parent.parent).create(target.parent.name, target.name, b'manifest')
""",
    "model get": """
import hashlib
from edl.cli.shared import received
about = received.File(5, hashlib.sha256(b'model').hexdigest())
with received.receiving(target) as made, made.file('model', about) as write:
    write(b'model')
""",
    "rows export": """
from types import SimpleNamespace
from edl.rows import export
export.export(SimpleNamespace(tables=lambda: []), target)
""",
}
WRITING = """
import os, pathlib
target = pathlib.Path({target!r})
if {killed}:
    os.fsync = os.replace = lambda *_: os.kill(os.getpid(), 9)
{writer}
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process and those that it starts make temporary directories."""
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def holder(ending: str = "sys.stdin.read()") -> subprocess.Popen[bytes]:
    """A process with a directory for a while, and one for as long as it runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", IN_SYNC.format(ending=ending)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() != b""
    return process


def left(place: Path) -> int:
    return len(list(place.glob("edl-*")))


def test_a_process_that_exits_leaves_nothing(place: Path) -> None:
    with holder("pass") as process:
        assert process.wait() == 0
    assert left(place) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_killed_process_leaves_is_removed_with_the_next_directory(
    place: Path, number: signal.Signals
) -> None:
    with holder() as process, holder() as other:
        process.send_signal(number)
        assert process.wait() == -number
        assert left(place) == 4
        with scratch.directory() as mine:
            assert left(place) == 3, "those of the other process, and this one"
            scratch.remove_abandoned()
            assert mine.is_dir()
        assert left(place) == 2
        other.communicate(b"")
    assert left(place) == 0


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_a_writer_that_was_killed_leaves_nothing_beside_its_successors_file(
    tmp_path: Path, writer: str
) -> None:
    target = tmp_path / "models" / "model"
    target.parent.mkdir()
    (target.parent / ".model.of-the-user").mkdir()
    for killed in (True, False):
        program = WRITING.format(target=str(target), killed=killed, writer=writer)
        code = subprocess.run([sys.executable, "-c", program]).returncode
        assert code == (-signal.SIGKILL if killed else 0)
        assert target.exists() != killed
    assert {path.name for path in target.parent.iterdir()} == {"model", ".model.of-the-user"}


def test_a_directory_for_results_goes_only_if_its_process_was_killed_before_one_was_complete(
    place: Path,
) -> None:
    program = (
        "import os, sys; from edl import scratch; path = scratch.for_results(); "
        "(path / sys.argv[1]).touch(); os.kill(os.getpid(), 9)"
    )
    for name in ("model.keras", ".0.model.keras"):
        assert subprocess.run([sys.executable, "-c", program, name]).returncode == -signal.SIGKILL
    mine = scratch.for_results()
    assert left(place) == 2, "that of the complete model, and this one"
    scratch.remove_abandoned()
    assert mine.is_dir(), "this process lives"
    assert [path.name for path in place.glob("*/*")] == ["model.keras"]


def test_directories_of_another_user_are_left(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / f"{scratch.PREFIX}another").mkdir()
    with monkeypatch.context() as root:
        root.setattr(os, "getuid", lambda: place.stat().st_uid + 1)
        scratch.remove_abandoned()
    assert left(place) == 1
    scratch.remove_abandoned()
    assert left(place) == 0


def test_the_text_of_a_model_lies_in_such_a_directory(place: Path) -> None:
    found = user_model.load("", "def model(): ...\ndef data(split): ...\n")
    file = Path(found.model.__code__.co_filename)
    assert (file.parent.parent, file.name) == (place, "model_source.py")
    scratch.remove_abandoned()
    assert file.is_file(), "this process lives"
    assert file.parent.name.startswith(scratch.PREFIX)


async def test_what_a_killed_worker_leaves_is_removed_with_its_job(place: Path, tmp_path: Path) -> None:
    gone = asyncio.Event()
    program = IN_SYNC.format(ending="os.kill(os.getpid(), 9)")
    backend = Processes(
        lambda event: gone.set() if isinstance(event, ev.Gone) else None,
        Spawn([sys.executable, "-c", program], dict(os.environ)),
        tmp_path / "logs",
    )
    await backend.start()
    backend.perform(ef.Create(WorkerId(0)))
    await gone.wait()
    assert left(place) == 2
    await backend.close()
    assert left(place) == 0
