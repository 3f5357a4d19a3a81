# SPDX-License-Identifier: Apache-2.0
"""`edl audit` on the journals of Horovod scripts, whose commits it counts."""

from __future__ import annotations

from pathlib import Path

from edl.contract import artifacts
from edl.contract.ids import WorkerId
from edl.journal import audit
from edl.master.core import effects as ef
from edl.master.core import events as ev
from tests.support.jobs.journals import keep
from tests.support.jobs.stories import Story, only


def script(workers: int) -> Story:
    model, records = {"script": "/train.py"}, 1 << 50
    how = {"mode": "horovod", "horovod": {"elastic": True}, "joinDelaySeconds": 0.5}
    return Story(workers, records=records, model=model, **how).running()  # type: ignore[arg-type]


def test_a_horovod_script_is_audited_by_its_commits(tmp_path: Path) -> None:
    story = script(2)
    story.tell(ev.Progress(story.job.ring.generation, 8))
    story.kill(0)
    only(story.out(1, step=7, broken="reset"), ef.Form)
    story.up(7)
    story.tell(ev.Progress(story.job.ring.generation, 20))
    story.tell(ev.Live(2, 1, False, 7))  # epochs of a training, which a script has not
    (tmp_path / "now").mkdir()
    keep(story, tmp_path / "now")
    (tmp_path / "now" / artifacts.SUMMARY).unlink()
    assert audit.audit(tmp_path / "now").startswith(
        "the job has not ended; so far, at least 19 commits in 2 rings, and no ring began behind a commit "
        "that all members had; not proved: records and weights, because a Horovod script reads its own data; "
    )
    story.tell(ev.Finished(WorkerId(1), {}, ""))
    story.tell(*(ev.Gone(w.id, code=0) for w in list(story.job.pool)))
    keep(story, tmp_path)
    assert audit.audit(tmp_path).startswith(
        "the script of 1 worker has ended by itself, after at least 19 commits in 2 rings, and no ring"
    )


def test_lost_commits_of_a_horovod_script_are_part_of_the_verdict(tmp_path: Path) -> None:
    story = script(1)
    story.tell(ev.Progress(story.job.ring.generation, 8))
    story.kill(0)
    story.ready(1)
    story.up()
    story.tell(ev.Finished(WorkerId(1), {}, ""))
    story.tell(*(ev.Gone(w.id, code=0) for w in list(story.job.pool)))
    keep(story, tmp_path)
    told = audit.audit(tmp_path)
    assert (
        "no commit in 2 rings, and no ring began behind a commit that all members had without a report; "
        in told
    )
    assert "; the newest state was lost once and training went on from what was left; " in told
