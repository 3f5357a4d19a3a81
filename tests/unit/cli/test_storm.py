# SPDX-License-Identifier: Apache-2.0
"""`edl chaos`: the faults of a seed, when a job has recovered, and the arithmetic of the report."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from edl.cli.shared import storm
from edl.cli.shared.storm import Fault, Hit, Kind, Recovery
from edl.errors import ConfigError
from edl.report.timeline import Change


def status(*members: int, step: int = 10, servers: tuple[tuple[str, int], ...] = (), **more: Any) -> Any:
    """The status of a job.

    Args:
        servers: state and number of restarts of each.
    """
    return {
        "phase": "Training",
        "reason": "because",
        "step": step,
        "target": 3,
        "checkpoint": None,
        "workers": [{"id": w, "handle": str(100 + w), "state": "member"} for w in members]
        + [{"id": 99, "handle": "199", "state": "initializing"}],
        "servers": [{"index": i, "state": s, "restarts": r} for i, (s, r) in enumerate(servers)],
    } | more


def fault(kind: Kind, seconds: float = 5.0) -> Fault:
    return Fault(kind, 0.0, 1.0, seconds)


def test_a_seed_gives_the_same_faults_of_the_chosen_kinds_only() -> None:
    kinds = [Kind.kill, Kind.stop, Kind.term]
    planned = list(itertools.islice(storm.plan(7, kinds), 300))
    assert planned == list(itertools.islice(storm.plan(7, kinds), 300))
    assert planned != list(itertools.islice(storm.plan(8, kinds), 300))
    assert {each.kind for each in planned} == set(kinds)
    assert all(1 <= each.seconds <= 20 and 0 <= each.delay <= 2 for each in planned)
    three = status(4, 5, 6)["workers"][:3]
    assert {each.choose(three)["id"] for each in planned} == {4, 5, 6}
    mean = sum(each.delay for each in planned) / len(planned)
    assert 0.9 < mean < 1.1, "--every is the mean"


@pytest.mark.parametrize(
    ("only", "words"),
    [
        ("kill,rm", r"--only rm: unknown kind \(expected kill, term\)"),
        ("stop", r"--only stop: this job cannot be hit by it \(expected kill, term\)"),
    ],
)
def test_kinds_that_cannot_be_are_refused_by_name(only: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        storm.kinds_of(only, (Kind.kill, Kind.term))


def test_chosen_kinds_have_one_order() -> None:
    assert storm.kinds_of("term, kill", tuple(Kind)) == [Kind.kill, Kind.term]
    assert storm.kinds_of("", (Kind.kill, Kind.term)) == [Kind.kill, Kind.term]


def test_the_only_copy_of_the_state_is_spared() -> None:
    assert [w["id"] for w in storm.candidates(status(4, 5), Kind.kill)] == [4, 5]
    assert storm.candidates(status(4), Kind.kill) == []
    assert len(storm.candidates(status(4, checkpoint={"step": 3}), Kind.term)) == 1
    up = status(4, servers=(("running", 0), ("starting", 1)))
    assert [s["index"] for s in storm.candidates(up, Kind.server)] == [0]


def test_a_job_has_recovered_once_the_victim_is_replaced_and_a_step_is_made() -> None:
    before = status(0, 1, 2, step=10)
    recovered = Recovery(before, Kind.kill, before["workers"][1])
    assert not recovered(status(0, 1, 2, step=12)), "the master has not noticed it yet"
    assert not recovered(status(0, 2, step=14)), "two train, and the third is missing"
    assert not recovered(status(0, 2, 3, step=14)), "all are back, and have not made a step"
    assert not recovered({"phase": "Training", "reason": "a short status"})
    assert not recovered(status(0, 2, 3, step=14))
    assert recovered(status(0, 2, 3, step=15))


def test_a_job_that_was_scaled_down_meanwhile_recovers_with_fewer_workers() -> None:
    before = status(0, 1, 2)
    recovered = Recovery(before, Kind.term, before["workers"][0])
    assert not recovered(status(1, 2, step=11, target=2))
    assert recovered(status(1, 2, step=12, target=2))


def test_a_stopped_worker_may_stay() -> None:
    before = status(0, 1, 2)
    recovered = Recovery(before, Kind.stop, before["workers"][0])
    assert not recovered(status(0, 1, 2, step=10))
    assert recovered(status(0, 1, 2, step=11))


def test_a_server_has_recovered_once_it_runs_again() -> None:
    before = status(0, 1, servers=(("running", 0), ("running", 2)))
    recovered = Recovery(before, Kind.server, before["servers"][1])
    assert not recovered(before | {"step": 11}), "the master has not noticed it yet"
    assert not recovered(before | {"step": 12}), "nor now"
    assert not recovered(status(0, 1, step=12, servers=(("running", 0), ("starting", 3))))
    assert not recovered(status(0, 1, step=12, servers=(("running", 0), ("running", 3))))
    assert recovered(status(0, 1, step=13, servers=(("running", 0), ("running", 3))))


def change(generation: int, stall: float, redone: int, stepped: float | None = 9.0) -> Change:
    return Change(generation, (0, 1), (0, 1), 1.0, None, 2.0, stepped=stepped, stall=stall, redone=redone)


def test_the_report_adds_up_what_the_storm_has_cost() -> None:
    hits = [
        Hit(fault(Kind.kill), "worker 1", 4.0),
        Hit(fault(Kind.kill), "worker 2", 8.0),
        Hit(fault(Kind.stop, seconds=7.5), "worker 3", 7.75, stayed=True),
        Hit(fault(Kind.stop, seconds=15.0), "worker 4", 16.0),
        Hit(fault(Kind.term), "worker 5", None),
    ]
    changes = [
        change(2, 0.5, 32),
        change(3, 1.5, 0),
        change(4, 0.0, 8, stepped=None),  # this ring broke before its first step
        change(5, 2.5, 64),
    ]
    told = storm.report(hits, changes, status(0, 3, epoch_loss=0.5), "exactly once: all", True)
    assert told["faults"] == {"kill": 2, "stop": 2, "term": 1}
    assert told["stalls"] == {"count": 4, "median_seconds": 2.0, "longest_seconds": 7.5}
    assert told["recoveries"] == {"count": 4, "median_seconds": 7.875, "longest_seconds": 16.0}
    assert (told["redone_records"], told["unrecovered"]) == (104, ["worker 5"])
    assert (told["workers"], told["target"]) == (2, 3)
    assert storm.lines(told) == [
        "faults    5: 2 kill, 2 stop, 1 term",
        "stalls    4, median 2.00 s, longest 7.50 s",
        "recovered 4, median 7.88 s, longest 16.00 s",
        "redone    104 records",
        "audit     exactly once: all",
        "job       Training: because",
        "workers   2 of 3 in the ring",
        "warning   no recovery was seen from the faults on worker 5",
        "loss      0.5000",
    ]


def test_final_metrics_are_beside_those_of_the_undisturbed_job() -> None:
    summary = {"phase": "Succeeded", "reason": "because", "epoch_loss": 0.25, "metrics": {"accuracy": 0.97}}
    told = storm.report([], [], summary, "step 3 was applied twice", False)
    assert told["stalls"] == {"count": 0, "median_seconds": None, "longest_seconds": None}
    assert told["workers"] is None
    undisturbed = storm.final_metrics({"epoch_loss": None, "metrics": {"accuracy": 0.9711, "auc": 1}})
    assert storm.lines(told | {"undisturbed": undisturbed}) == [
        "faults    0",
        "stalls    none",
        "recovered none",
        "redone    0 records",
        "audit     FAILED: step 3 was applied twice",
        "job       Succeeded: because",
        "accuracy  0.9700, undisturbed 0.9711",
        "auc       none, undisturbed 1.000",
        "loss      0.2500, undisturbed none",
    ]
