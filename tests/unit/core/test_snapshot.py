# SPDX-License-Identifier: Apache-2.0
"""The core's state as JSON and back: `edl.master.core.snapshot`."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, deque
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel

from edl import config
from edl.config import values
from edl.master.core import events as ev
from edl.master.core import snapshot
from edl.master.core.job import Job
from edl.master.core.quorum import Limits
from edl.master.jobs import new_job
from tests.simulator.world import World
from tests.support.jobs.journals import whole_story
from tests.support.jobs.stories import Story

SEEDS = 30
EVERY = 3  # events


def lived(seed: int) -> Iterator[tuple[Job, float, ev.Event]]:
    """All events of a simulated job under faults, each with the job of the master that had it."""
    world = World(seed, masters=1)
    told: list[tuple[Job, float, ev.Event]] = []
    tell = world.master._tell

    def listen(event: ev.Event) -> None:
        told.append((world.master.job, world.clock.now, event))
        tell(event)

    world.master._tell = listen
    world.run()
    yield from told


def kept(job: Job) -> Job:
    """What comes back of a job that was written to a file."""
    return snapshot.load(json.loads(json.dumps(snapshot.dump(job))), job.config, job.work)


def test_a_job_that_was_kept_again_and_again_decides_as_one_that_never_was() -> None:
    times = 0
    for seed in range(SEEDS):
        master: Job | None = None
        for number, (of, now, event) in enumerate(lived(seed)):
            if of is not master:
                master, straight, again = of, new_job(of.config), new_job(of.config)
            assert again.handle(event, now) == straight.handle(event, now), f"seed {seed}, event {number}"
            if number % EVERY == 0:
                times += 1
                again = kept(again)
                assert difference(straight, again) == "", f"seed {seed}, event {number}"
    assert times > 10 * SEEDS


def difference(one: Any, other: Any, where: str = "job", known: dict[int, Any] | None = None) -> str:
    """Where two states differ: in a value, a type, or in what is the same object. Knows of no snapshot."""
    known = {} if known is None else known
    if type(one) is not type(other):
        return f"{where}: {one!r}, {other!r}"
    if one is None or isinstance(one, int | float | str | Enum | BaseModel):
        return "" if one == other else f"{where}: {one!r}, {other!r}"
    if id(one) in known:
        frozen = dataclasses.is_dataclass(one) and one.__dataclass_params__.frozen
        whole = known[id(one)] is other or isinstance(one, tuple | frozenset) or frozen
        return "" if whole else f"{where}: it is not the same object as elsewhere"
    known[id(one)] = other
    if isinstance(one, set | frozenset):
        return "" if one == other else f"{where}: {one!r}, {other!r}"
    parts, others = dict(_parts(one)), dict(_parts(other))
    if list(parts) != list(others):
        return f"{where}: {list(parts)}, {list(others)}"
    found = (difference(part, others[key], f"{where}.{key}", known) for key, part in parts.items())
    return next((text for text in found if text), "")


def _parts(of: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(of, dict):
        yield from of.items()
    elif isinstance(of, list | tuple):
        yield from enumerate(of)
    elif dataclasses.is_dataclass(of):
        yield from ((f.name, getattr(of, f.name)) for f in dataclasses.fields(of))
    else:
        yield from (
            (key, part) for key, part in vars(of).items() if not (isinstance(of, Job) and key == "effects")
        )


def test_a_field_that_is_added_to_the_state_is_kept() -> None:
    job = whole_story().job
    added = {1: (2.5, None), (2, "b"): [{3}, frozenset({4})], "c": Counter("aab"), "d": Limits(1, 2)}
    job.added = added  # type: ignore[attr-defined]
    job.pool.added = [job.ring]  # type: ignore[attr-defined]
    again = kept(job)
    assert difference(added, again.added) == ""  # type: ignore[attr-defined]
    assert again.pool.added[0] is again.ring  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("added", "words"),
    [
        (deque([1]), r"job.pool.added is a collections.deque, which no snapshot can hold"),
        (lambda: 1, r"job.pool.added is a builtins.function, which no snapshot can hold"),
        ([Story], r"job.pool.added\[0\] is a builtins.type, which no snapshot can hold"),
    ],
)
def test_what_cannot_be_kept_is_named(added: object, words: str) -> None:
    job = whole_story().job
    job.pool.added = added  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=words):
        snapshot.dump(job)


def test_a_list_in_two_places_would_become_two_and_is_named() -> None:
    job = whole_story().job
    job.pool.added = job.notes.warnings = ["the same list"]  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"job.*: the same list is in two places; it would become two"):
        snapshot.dump(job)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        3,
        [],
        {},
        {"Job": 3},
        {"Pool": {}},
        {"os.system": {}},
        {"same": 0},
        {"given": "token"},
        {"Job": {"members": {"tuple": {"runs": [[0, 10**12, 1]]}}}},
        {"Phase": "Dreaming"},
        {"map": [[1]]},
    ],
)
def test_what_is_no_state_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        snapshot.load(wrong, config.parse(values.defaults()))


def test_many_workers_in_a_row_take_little_room() -> None:
    story = Story(workers=60, joinDelaySeconds=5).running()
    members = snapshot.dump(story.job)["Job"]["ring"]["Ring"]["members"]
    assert members == {"tuple": {"runs": [[0, 60, 1]]}}
    assert kept(story.job).ring.members == story.job.ring.members
