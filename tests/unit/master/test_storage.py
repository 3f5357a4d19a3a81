# SPDX-License-Identifier: Apache-2.0
"""The files on a master's volume: what callers may write, what broken streams leave, whose files they are.

That it is a store of checkpoints like any other is the subject of tests/contract/test_checkpoint_store.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.checkpoints import Store
from edl.checkpoints.master import MasterAway, MasterPlace
from edl.contract import artifacts
from edl.master.rpc.storage import EARLIER, Storage
from edl.trainer.session.results import SentResults
from edl.trainer.session.state import Session
from tests.support.checkpoints.checkpoints import TENSORS, manifest_of
from tests.support.checkpoints.master import RUN, serving

DIRECTORY = "step-000000000001-a"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The volume of a master that serves it to this process."""
    with serving(tmp_path / "volume", monkeypatch):
        yield tmp_path / "volume"


def files(root: Path) -> dict[str, str]:
    """The texts of all files below a folder."""
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_text() for path in found}


@pytest.mark.parametrize(
    ("url", "directory", "name"),
    [
        ("master://", "", artifacts.JOURNAL),
        ("master://logs", "", "x"),
        ("master://checkpoints", "../logs", "x"),
        ("master://checkpoints", DIRECTORY, "../../x"),
    ],
)
def test_only_checkpoints_and_the_results_of_the_run_can_be_written(
    root: Path, url: str, directory: str, name: str
) -> None:
    root.mkdir()
    (root / artifacts.JOURNAL).write_text("a journal")
    place = MasterPlace(url)
    for act in (
        lambda: place.create(directory, name, b"x"),
        lambda: place.write(directory, name, iter([memoryview(b"x")])),
        lambda: place.remove(directory, [name]),
        lambda: place.open(directory, name),
    ):
        with pytest.raises(OSError, match="is not a file of the checkpoints or of this run's results"):
            act()
    assert files(root) == {artifacts.JOURNAL: "a journal"}


@pytest.mark.parametrize("place", ["run-another", EARLIER])
def test_what_an_earlier_run_has_left_can_be_read_and_not_changed(root: Path, place: str) -> None:
    (root / place / DIRECTORY).mkdir(parents=True)
    (root / place / DIRECTORY / "part").write_text("p")
    (root / place / artifacts.MODEL).write_text("m")
    earlier = MasterPlace(f"master://{place}")
    assert earlier.sizes("") == {artifacts.MODEL: 1} and earlier.sizes(DIRECTORY) == {"part": 1}
    assert earlier.all("step-", lambda name: True) == {DIRECTORY: {"part": 1}}
    with earlier.open("", artifacts.MODEL) as file:
        assert file.read() == b"m"
    for change in (
        lambda: earlier.create("", "new", b"x"),
        lambda: earlier.write(DIRECTORY, "new", iter([memoryview(b"x")])),
        lambda: earlier.rename(DIRECTORY, "part", "other"),
        lambda: earlier.remove(DIRECTORY, ["part"]),
    ):
        with pytest.raises(OSError, match="is not a file of the checkpoints or of this run's results"):
            change()
    assert files(root) == {f"{place}/{artifacts.MODEL}": "m", f"{place}/{DIRECTORY}/part": "p"}


def test_a_file_whose_master_ends_while_it_is_sent_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(1 << 20))
        begun.set()
        ended.wait(30)
        yield memoryview(bytes(1 << 20))

    failed: list[OSError] = []

    def send(place: MasterPlace) -> None:
        try:
            place.write(DIRECTORY, "part", pieces())
        except OSError as error:
            failed.append(error)

    with serving(tmp_path, monkeypatch):
        place = MasterPlace("master://checkpoints")
        sending = threading.Thread(target=send, args=(place,))
        sending.start()
        assert begun.wait(30)
    ended.set()
    sending.join(30)
    assert [type(error) for error in failed] == [MasterAway] and place.may_pass(failed[0])
    with serving(tmp_path, monkeypatch):
        assert MasterPlace("master://checkpoints").sizes(DIRECTORY) == {}
    assert not files(tmp_path)


def test_results_are_sent_when_they_have_changed_and_removed_when_they_are_gone(
    root: Path, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    (results / "model.savedmodel" / "variables").mkdir(parents=True)
    (results / "model.savedmodel" / "variables" / "index").write_text("i")
    (results / ".saving-1").mkdir()
    (results / ".saving-1" / "half").write_text("h")
    (results / artifacts.VARIABLES).write_text("v")
    said: list[str] = []
    session = Session(0, lambda message: said.append(message.warned.text), threading.Event())
    sent = SentResults(results, f"master://run-{RUN}", session)
    sent.send()
    there = {"model.savedmodel/variables/index": "i", artifacts.VARIABLES: "v"}
    assert files(root / f"run-{RUN}") == there
    (results / artifacts.VARIABLES).unlink()
    (results / artifacts.MODEL).write_text("m")
    (results / "model.savedmodel" / "variables" / "index").write_text("another")
    sent.send()
    there = {"model.savedmodel/variables/index": "another", artifacts.MODEL: "m"}
    assert files(root / f"run-{RUN}") == there and said == []
    (root / f"run-{RUN}" / artifacts.HISTORY).mkdir()  # in the way of a file
    (results / artifacts.HISTORY).write_text("h")
    sent.send()
    (told,) = said
    assert "cannot keep the trained model: Is a directory; the model is in this worker's pod only" in told


def test_results_wait_for_the_next_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / artifacts.MODEL).write_text("m")
    session = Session(0, lambda message: None, threading.Event())
    with serving(tmp_path / "volume", monkeypatch):
        sent = SentResults(results, f"master://run-{RUN}", session)
    tried = threading.Event()
    update = sent._update

    def again() -> None:
        if not tried.is_set():
            tried.set()
            raise MasterAway(0, "away")
        update()

    monkeypatch.setattr(sent, "_update", again)
    monkeypatch.setattr("edl.trainer.session.results.AGAIN_SECONDS", 0.01)
    with serving(tmp_path / "volume", monkeypatch):
        update = SentResults(results, f"master://run-{RUN}", session)._update
        sent.send()
    assert tried.is_set() and files(tmp_path / "volume") == {f"run-{RUN}/{artifacts.MODEL}": "m"}


@pytest.mark.parametrize("resume", [False, True])
def test_another_run_begins_without_the_checkpoints_of_the_last_one(tmp_path: Path, resume: bool) -> None:
    writing = Store.open(str(tmp_path / "checkpoints")).begin(1, "1")
    made = writing.commit(manifest_of(1, TENSORS, (writing.write_part(0, 1, TENSORS),)))
    (tmp_path / EARLIER).mkdir()
    (tmp_path / EARLIER / "older").touch()
    Storage(tmp_path, made.manifest.run).begin(resume)
    assert (tmp_path / EARLIER / "older").exists(), "the same run goes on"
    Storage(tmp_path, "another").begin(resume)
    kept = tmp_path / ("checkpoints" if resume else EARLIER)
    assert [c.step for c in Store.open(str(kept)).checkpoints()] == [1]
    assert (tmp_path / EARLIER / "older").exists() == resume
