# SPDX-License-Identifier: Apache-2.0
"""Messages that are read and made without protobuf: as protobuf reads and makes them."""

from __future__ import annotations

import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows import wire

GIVEN = [
    pb.Gradients(table=300, ids=bytes(range(16)), values=b"x" * 200),
    pb.Gradients(),
    pb.Gradients(table=1, values=b"y" * 70_000),
]
STAGED = pb.PushRequest(run_id="a run", generation=1 << 40, step=7, rank=2, gradients=GIVEN)


def test_a_message_is_taken_apart_into_what_is_large_and_the_rest() -> None:
    rest, found = wire.without(STAGED.SerializeToString(), pb.PushRequest.GRADIENTS_FIELD_NUMBER)
    assert [pb.Gradients.FromString(bytes(one)) for one in found] == GIVEN
    left = pb.PushRequest.FromString(rest)
    left.gradients.extend(GIVEN)
    assert left == STAGED


def test_every_kind_of_field_is_read_in_any_order() -> None:
    commit = pb.Commit(step=-1, skipped=True, scale=0.5, learning_rate=0.1, iteration=1 << 62)
    asked = pb.PullRequest(run_id="r", last=commit, ids=[pb.Ids(ids=b"12345678")])
    parts = [pb.PullRequest(run_id="r"), pb.PullRequest(ids=asked.ids), pb.PullRequest(last=commit)]
    raw = b"".join(part.SerializeToString() for part in reversed(parts))
    found = {number: held for number, held, _, _ in wire.fields(raw)}
    assert pb.Commit.FromString(bytes(found[4])) == commit
    assert {n: held for n, held, _, _ in wire.fields(found[4])}[1] == (1 << 64) - 1
    rest, ids = wire.without(raw, pb.PullRequest.IDS_FIELD_NUMBER)
    assert pb.PullRequest.FromString(rest) == pb.PullRequest(run_id="r", last=commit)
    assert [bytes(one) for one in ids] == [asked.ids[0].SerializeToString()]


def test_a_message_that_is_cut_off_is_none() -> None:
    raw = pb.Gradients(table=300, ids=b"12345678", values=b"1234").SerializeToString()
    ends = {end for _, _, _, end in wire.fields(raw)} | {0}
    for length in range(len(raw)):
        if length in ends:
            assert len([*wire.fields(raw[:length])]) < 3
        else:
            with pytest.raises(wire.NotAMessage):
                [*wire.fields(raw[:length])]


@pytest.mark.parametrize("raw", [b"\x0b\x00", b"\x08" + b"\xff" * 11 + b"\x01"])
def test_what_no_message_has_is_refused(raw: bytes) -> None:
    with pytest.raises(wire.NotAMessage):
        [*wire.fields(raw)]
    with pytest.raises(wire.NotAMessage):
        wire.without(b"\x38\x01", pb.PushRequest.GRADIENTS_FIELD_NUMBER)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 20_000])
def test_what_is_carried_is_as_protobuf_writes_it(size: int) -> None:
    content = b"z" * size
    made = b"".join([b"\x08\x07", *wire.carried(4, [content[:5], memoryview(content)[5:]])])
    assert pb.Answer.FromString(made) == pb.Answer(number=7, answer=content)
