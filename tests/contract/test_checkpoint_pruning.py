# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are removed or set aside, in all places: a directory, memory, and a real S3 server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from edl.checkpoints import Best, Store
from edl.checkpoints.manifest import FILE
from edl.errors import CheckpointRemoved
from tests.contract.conftest import Place
from tests.support.checkpoints.checkpoints import TENSORS, manifest_of, unexpected, write


def test_pruning_keeps_the_newest_and_the_best(place: Place) -> None:
    losses = {1: 0.5, 2: 0.2, 3: float("nan"), 4: 0.4, 5: 0.3, 6: 0.6}
    for step, loss in losses.items():
        write(place.store, step, metrics={"loss": loss})
    place.store.begin(4, "2").write_part(0, 2, TENSORS)  # abandoned by a killed writer
    place.store.begin(7, "1").write_part(0, 2, TENSORS)  # an unfinished checkpoint
    assert [(c.step, c.attempt) for c in place.store.prune(0, Best("loss"))] == [(4, "2")]
    assert [c.step for c in place.store.checkpoints()] == [1, 2, 3, 4, 5, 6]
    assert [c.step for c in place.store.unfinished()] == [7]
    assert {c.step for c in place.store.prune(2, Best("loss"))} == {1, 3, 4}
    assert [c.step for c in place.store.checkpoints()] == [2, 5, 6]
    place.store.prune(1, Best("loss", largest=True))
    assert [c.step for c in place.store.checkpoints()] == [6]
    place.store.checkpoints()[0].verify()


def test_one_that_is_removed_while_it_is_read_is_not_called_damaged(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write(place.store, step)
    listed = place.store.checkpoints()
    # A directory is not listed at once: its manifest can be in the list, and its parts be removed.
    listed[0] = replace(listed[0], files={FILE: listed[0].files[FILE]})
    place.store.prune(1)
    for checkpoint in listed[:2]:
        with pytest.raises(CheckpointRemoved, match=f"^{checkpoint.directory}: was removed while"):
            checkpoint.verify()
        with pytest.raises(CheckpointRemoved):
            checkpoint.read()
        assert checkpoint.was_removed()
    assert not listed[2].was_removed()

    monkeypatch.setattr(Store, "checkpoints", lambda _: listed[:2])
    assert place.store.newest(unexpected) is None


def test_an_attempt_that_is_not_newer_than_a_complete_one_is_removed_and_has_not_failed(place: Place) -> None:
    """The ring begins a checkpoint; a worker that leaves writes one of the same step alone."""
    writing = place.store.begin(1, "of-the-ring")
    parts = writing.write_part(0, 2, TENSORS), writing.write_part(1, 2, TENSORS)
    write(place.store, 1)
    place.store.prune(1)
    with pytest.raises(CheckpointRemoved, match="cannot commit the checkpoint of step 1"):
        writing.commit(replace(manifest_of(1, TENSORS, parts), attempt="of-the-ring"))
    assert [c.attempt for c in place.store.checkpoints()] == ["1"]


@pytest.mark.parametrize("first", ["committed", "pruned"])
def test_one_that_is_committed_while_it_is_pruned_is_not_there(
    place: Place, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    writing, pruned = place.store.begin(1, "1"), place.store
    manifest = manifest_of(1, TENSORS, (writing.write_part(0, 1, TENSORS),))
    write(place.store, 2)
    if first == "committed":  # after `prune` has listed it as unfinished
        remove, commits = pruned.place.remove, [lambda: writing.commit(manifest)]

        def commit_and_remove(directory: str, names: Sequence[str]) -> None:
            while commits:
                commits.pop()()
            remove(directory, names)

        monkeypatch.setattr(pruned.place, "remove", commit_and_remove)
        pruned.prune(1)
        assert not commits
    else:  # after `commit` has seen that all parts are there
        create = writing.place.create

        def prune_and_create(directory: str, name: str, data: bytes) -> bool:
            pruned.prune(1)
            return create(directory, name, data)

        monkeypatch.setattr(writing.place, "create", prune_and_create)
        writing.commit(manifest)
    assert [c.step for c in place.store.checkpoints()] == [2]
    assert place.files(writing.directory) == []


def test_a_damaged_one_is_not_counted_among_those_to_keep(place: Place) -> None:
    write(place.store, 1)
    later = write(place.store, 2)
    place.client.pipe_file(place.files(later.directory)[-1], b"")
    place.store.prune(1)
    assert [c.step for c in place.store.checkpoints()] == [1, 2]  # 2 is newer than the newest whole one
    write(place.store, 3)
    place.store.prune(1)
    assert [c.step for c in place.store.checkpoints()] == [3]


def test_what_was_completed_last_is_not_given_up_for_a_later_one_that_cannot_be_read(place: Place) -> None:
    write(place.store, 10)
    later = place.files(write(place.store, 20).directory)[-1]
    data = place.client.cat_file(later)
    place.client.pipe_file(later, data[:-1] + bytes([data[-1] ^ 1]))
    for step in (12, 14):  # the training continued from step 10
        write(place.store, step)
        place.store.begin(step + 1, "1").write_part(0, 2, TENSORS)  # the next one is being written
        place.store.prune(1)
        assert [c.step for c in place.store.checkpoints()] == [step, 20]
        assert [c.step for c in place.store.unfinished()] == [step + 1]


def test_what_the_training_has_left_behind_is_set_aside(place: Place) -> None:
    for step in (1, 2, 3):
        write(place.store, step)
    assert [c.step for c in place.store.supersede(after=1)] == [2, 3]
    assert [c.step for c in place.store.checkpoints()] == [1]
    write(place.store, 2, attempt="2")
    newest = place.store.newest(unexpected)
    assert newest is not None and (newest.step, newest.attempt) == (2, "2")
    place.store.prune(1)
    assert [(c.step, c.attempt) for c in place.store.unfinished()] == [(3, "1")]
    write(place.store, 3, attempt="2")
    place.store.prune(1)
    assert place.store.unfinished() == []
