# SPDX-License-Identifier: Apache-2.0
"""Predictions: each record once, in files that are whole, whichever worker dies and however often."""

from __future__ import annotations

import errno
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from edl import config
from edl.config import values
from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout, StepSlice
from edl.contract.steps import Steps
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import view
from edl.master.core.ring import CHANGE, LOSS
from edl.trainer.evaluation.prediction import (
    DONE,
    FORMATS,
    Book,
    PredictionError,
    PredictionFiles,
    RingPrediction,
)
from edl.trainer.records.batches import Batch
from edl.trainer.ring.local import InProcessGroup
from edl.trainer.session.state import Session
from edl.trainer.start import build_inference
from tests.support.jobs.stories import Story, of, only
from tests.support.jobs.workers import A, ring_of
from tests.support.models.counting import AtOnce

RECORDS, PART = 95, 3  # two rounds of 16 parts
BOOK = Book(RECORDS, PART, "a model", "its weights", "npz")
CONFIG = config.parse(
    values.merge(values.defaults(), {"mode": "predict", "prediction": {"partRecords": PART}})
)


class Numbers:
    """Records that are their places."""

    layout = Layout(RECORDS)

    def lay_out(self, layout: Layout) -> None:
        assert layout == self.layout

    def batch(self, start: int, stop: int, part: StepSlice) -> Batch:
        places = np.arange(start, stop)
        return Batch(places, places, None, None)


def double(batch: Batch, following: Callable[[], Batch | None]) -> dict[str, np.ndarray]:
    return {"output": np.stack([batch.x, 2 * batch.x], axis=1)}


def files_in(directory: Path, form: str = "npz") -> PredictionFiles:
    return PredictionFiles(str(directory), FORMATS[form], RECORDS, PART)


def predicting(
    number: int, directory: Path, kind: type[RingPrediction] = RingPrediction, **arguments: Any
) -> A:
    w = A(number, config=CONFIG, **arguments)
    steps = Steps(0, 1)
    plan = CONFIG.evaluation_plan(steps, {"predict": RECORDS})
    files = files_in(directory)
    w.rebuild(evaluation=kind(plan, Numbers(), double, files, reading=AtOnce()))
    w.worker.state.steps = steps
    return w


def read(directory: Path) -> tuple[list[int], list[list[int]]]:
    found = [np.load(path) for path in sorted(directory.glob("part-*.npz"))]
    return (
        [n for part in found for n in part["ids"].tolist()],
        [row for part in found for row in part["output"].tolist()],
    )


EVERY = list(range(RECORDS)), [[n, 2 * n] for n in range(RECORDS)]


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_a_ring_predicts_each_record_once_in_its_order(tmp_path: Path, size: int) -> None:
    files_in(tmp_path).begin(BOOK)
    workers = [predicting(number, tmp_path) for number in range(size)]
    ring_of(*workers, epochs=0)
    for w in workers:
        out = w.says("left_ring", 1)
        assert (out.step, out.round, out.broken) == (0, 2, "")
        w.stop()
    assert read(tmp_path) == EVERY
    files_in(tmp_path).end()
    assert json.loads((tmp_path / "predictions.json").read_text())["complete"]


def test_who_dies_in_a_round_leaves_neither_holes_nor_doubles(tmp_path: Path) -> None:
    seed = random.randrange(1000)
    print(f"seed {seed}")
    chance = random.Random(seed)
    files_in(tmp_path).begin(BOOK)

    class Dies(RingPrediction):
        """After some files, its process is gone: its connections close."""

        def part(self, now: Any, round: int) -> tuple[np.ndarray, int]:
            for number in list(self._ours(now, round))[: chance.randrange(8)]:
                batch = self._submit(number).result()
                assert batch is not None
                self._files.write(number, batch.indices, self._predict(batch, lambda: None))
            raise ValueError("gone")

    alive, dead = predicting(0, tmp_path), predicting(1, tmp_path, Dies)
    group = InProcessGroup(2)
    alive.form(group, 1, [0, 1], epochs=0)
    dead.form(group, 1, [0, 1], epochs=0)
    dead.thread.join(10)
    group.cut("worker 1 has died")
    out = alive.says("left_ring", 1)
    assert (out.round, bool(out.broken)) == (0, True)
    alive.form(InProcessGroup(1), 2, [0], sync=False, epochs=0)
    assert alive.says("left_ring", 2).round == 2
    alive.stop()
    assert read(tmp_path) == EVERY
    files_in(tmp_path).end()


def test_a_part_that_is_missing_or_foreign_is_named_at_the_end(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    files.begin(BOOK)
    for number in range(files.parts):
        files.write(number, np.arange(*files.ends(number)), {})
    seventh = tmp_path / files.name(7)
    seventh.rename(tmp_path / "part-000000000001-000000000002.npz")
    with pytest.raises(PredictionError, match=r"1 parts of the predictions are missing.*000000000021-"):
        files.end()
    (tmp_path / "part-000000000001-000000000002.npz").rename(seventh)
    (tmp_path / "part-9.npz").touch()
    with pytest.raises(PredictionError, match=r"holds other parts, too, e\.g\. part-9\.npz"):
        files.end()


def test_a_store_that_refuses_at_the_end_fails_the_job_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_in(tmp_path)
    files.begin(BOOK)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files._place, "sizes", refuse)
    said: list[Any] = []
    build_inference._end(Session(0, said.append, threading.Event()), files, None)
    [failed] = said[-1].finished.failed
    assert failed.part == "prediction" and "cannot list the predictions: Permission denied" in failed.why


def test_parquet_keeps_the_shape_of_the_outputs(tmp_path: Path) -> None:
    files = files_in(tmp_path, "parquet")
    outputs = {
        "boxes": np.arange(12.0).reshape(3, 2, 2),
        "score": np.arange(3.0),
        "name": np.array(["a", "b", "c"]),
    }
    files.write(0, np.arange(3), outputs)
    table = pq.read_table(tmp_path / files.name(0)).to_pydict()
    assert (
        table["ids"] == [0, 1, 2] and table["score"] == [0.0, 1.0, 2.0] and table["name"] == ["a", "b", "c"]
    )
    assert table["boxes"] == outputs["boxes"].tolist()


def test_what_the_users_write_has_kept_leaves_a_mark(tmp_path: Path) -> None:
    files = PredictionFiles(str(tmp_path), DONE, RECORDS, PART)
    files.write(0, np.arange(3), {})
    assert [path.name for path in tmp_path.iterdir()] == ["part-000000000000-000000000003.done"]


# --- the master


def test_what_a_ring_has_done_is_told_also_while_it_is_left_for_one_who_joins() -> None:
    """The round that it is in may take long."""
    story = Story(1, mode="predict", joinDelaySeconds=0)
    story.tell(ev.Hello(WorkerId(0)), ev.Ready(WorkerId(0), Layout(0), held_out={"predict": 40_000}))
    story.tell(ev.JoinedRing(WorkerId(0), Generation(1), 0))
    ahead = ev.Progress(Generation(1), 0, round=1)
    story.job.close("worker 1 joins", CHANGE)
    assert view.status(story.job, 0.0, ahead=ahead)["pass"]["done"] == 16_000
    story.job.close("worker 0 is lost", LOSS)
    assert view.status(story.job, 0.0, ahead=ahead)["pass"]["done"] == 0, "it may be in no worker's state"


def test_a_job_that_predicts_forms_a_ring_and_ends_when_all_rounds_are_made() -> None:
    story = Story(2, mode="predict", joinDelaySeconds=9)
    for w in (WorkerId(0), WorkerId(1)):
        effects = story.tell(ev.Hello(w), ev.Ready(w, Layout(0), held_out={"predict": 40_000}))
    form = only(effects, ef.Form)
    assert (form.members, form.epochs, form.round, form.sync) == ((0, 1), 0, 0, True)
    story.tell(*(ev.JoinedRing(WorkerId(w), Generation(1), 0) for w in (0, 1)))
    story.kill(0)
    broken = ev.LeftRing(WorkerId(1), Generation(1), 0, True, broken="reset", round=2)
    form = only(story.tell(broken), ef.Form)
    assert (form.members, form.round) == ((1,), 2), "40,000 records are three rounds"
    status = view.status(story.job, 0.0)
    assert status["pass"] == {"split": "predict", "done": 32_000, "records": 40_000}
    story.tell(ev.JoinedRing(WorkerId(1), Generation(2), 0, 2))
    left = ev.LeftRing(WorkerId(1), Generation(2), 0, True, round=3)
    assert only(story.tell(left), ef.Export).worker == 1
    story.tell(ev.Finished(WorkerId(1), {}, ""))
    assert story.job.ending == (
        "Succeeded",
        "each of the 40,000 records of data('predict') is predicted exactly once",
    )
    assert not of(story.tell(ev.Tick()), ef.Form)
