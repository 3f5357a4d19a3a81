# SPDX-License-Identifier: Apache-2.0
"""Digests of the states in a checkpoint, and members whose state is not trusted."""

from __future__ import annotations

from pathlib import Path

from edl.contract.proto import edl_pb2 as pb
from edl.trainer.ring.local import InProcessGroup
from edl.trainer.worker import ReplicaDivergence
from tests.support.jobs.checkpoint_writers import Writer, write
from tests.support.jobs.workers import come_to_sum, ring_of


def states(w: Writer) -> list[bytes]:
    """What it has said of its state with its parts."""
    return [m.checkpoint_part.state for m in w.said if m.WhichOneof("body") == "checkpoint_part"]


def test_each_says_with_its_part_the_digest_of_its_whole_state(pair: list[Writer]) -> None:
    write(pair, 2)
    pair[1].learner.flip()
    come_to_sum(4, *pair)
    pair[0].hears(1, checkpoint=pb.Checkpoint())
    come_to_sum(6, *pair)
    for w in pair:
        w.beside.does()
    (same, one), (also, other) = map(states, pair)
    assert same == also and len(same) == 16
    assert one != other and one != same


def test_who_is_alone_has_nobody_to_compare_its_state_with(tmp_path: Path) -> None:
    w = Writer(0, tmp_path, changes={"checkpoint": {"steps": 2}})
    ring_of(w)
    come_to_sum(3, w)
    w.beside.does()
    w.ring.free()
    w.stop()
    assert states(w)[:1] == [b""]


def cut(workers: list[Writer]) -> None:
    """The ring is cut, and all have left it."""
    for w in workers:
        w.hears(1, cut=pb.Cut())
        w.ring.go_on()
    for w in workers:
        assert w.says("left_ring", 1).has_state


def test_members_whose_state_counts_no_longer_go_back_to_the_checkpoint_whatever_step_they_have(
    pair: list[Writer],
) -> None:
    write(pair, 2)
    come_to_sum(5, *pair)
    cut(pair)
    ring_of(*pair, generation=2, step=2, untrusted_up_to=1, untrusted_reason="they differ")
    for w in pair:
        assert w.says("joined_ring", 2).step == 2


def test_a_state_that_counts_no_longer_is_not_told_again_when_the_next_ring_breaks(
    pair: list[Writer],
) -> None:
    write(pair, 2)
    come_to_sum(5, *pair)
    cut(pair)
    pair[1].hears(2, cut=pb.Cut())
    pair[1].form(InProcessGroup(2), 2, [0, 1], untrusted_up_to=1, untrusted_reason="they differ", step=2)
    assert not pair[1].says("left_ring", 2).has_state


def test_where_there_is_no_checkpoint_to_go_back_to_the_root_says_so(pair: list[Writer]) -> None:
    come_to_sum(2, *pair)
    cut(pair)
    ring_of(*pair, generation=2, untrusted_up_to=1, untrusted_reason="they differ")
    error = pair[0].joined()
    assert isinstance(error, ReplicaDivergence)
    assert str(error) == "they differ. No checkpoint exists to roll back to"
    pair[1].hears(2, cut=pb.Cut())
