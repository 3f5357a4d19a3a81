# SPDX-License-Identifier: Apache-2.0
"""What waits to be sent to a worker, and how members learn where they await each other: `master.rpc`."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.contract import addresses
from edl.contract.ids import WorkerId
from edl.contract.proto import edl_pb2 as pb
from edl.master.rpc.outbox import Letter, Outbox
from edl.master.rpc.rendezvous import Rendezvous
from edl.trainer.session.kvstore import parts


def letter(generation: int = 0, **body: object) -> Letter:
    return Letter.of(pb.ToWorker(generation=generation, **body), "run-1")  # type: ignore[arg-type]


def waiting(*letters: Letter) -> list[tuple[str, int]]:
    """What is still to be sent of these, by a stream that has sent nothing."""
    outbox = Outbox()
    for one in letters:
        outbox.put(one)
    outbox.close()

    async def all_of_it() -> list[tuple[str, int]]:
        found = []
        while (wire := await outbox.next()) is not None:
            message = pb.ToWorker.FromString(wire)
            assert message.run_id == "run-1"
            found.append((str(message.WhichOneof("body")), message.generation))
        return found

    return asyncio.run(all_of_it())


FORM, TRAIN, LEAVE, CUT = pb.Form(members=[0, 1]), pb.Train(epochs=2), pb.Leave(), pb.Cut()


def test_letters_keep_their_order() -> None:
    sent = [
        letter(welcome=pb.Welcome()),
        letter(1, form=FORM),
        letter(1, train=TRAIN),
        letter(1, leave=LEAVE),
    ]
    assert waiting(*sent) == [("welcome", 0), ("form", 1), ("train", 1), ("leave", 1)]


def test_a_ring_makes_void_what_was_said_of_those_before_it_and_nothing_else() -> None:
    before = [
        letter(1, form=FORM),
        letter(1, train=TRAIN),
        letter(1, leave=LEAVE),
        letter(stop=pb.Stop(why="x")),
    ]
    assert waiting(*before, letter(2, form=FORM)) == [("stop", 0), ("form", 2)]


def test_a_cut_makes_void_what_else_its_ring_was_told_but_not_the_ring() -> None:
    said = [letter(1, form=FORM), letter(1, addresses=pb.Addresses(scope="/global")), letter(1, leave=LEAVE)]
    assert waiting(*said, letter(1, cut=CUT)) == [("form", 1), ("cut", 1)]


def test_changes_of_the_task_are_all_kept_for_all_members_take_each() -> None:
    assert waiting(*[letter(1, train=TRAIN)] * 3) == [("train", 1)] * 3


def test_a_worker_that_reads_nothing_costs_no_memory_that_grows() -> None:
    outbox = Outbox()
    for generation in range(1, 1000):
        outbox.put(letter(welcome=pb.Welcome(config="x" * 1000)))
        outbox.put(letter(generation, form=FORM))
        outbox.put(letter(generation, addresses=pb.Addresses(differ=[b"x" * 136] * 100)))
        outbox.put(letter(generation, leave=LEAVE))
        outbox.put(letter(generation, cut=CUT))
        assert len(outbox) <= 4


async def test_who_waits_for_a_letter_gets_it_and_a_closed_box_is_emptied_first() -> None:
    outbox = Outbox()
    coming = asyncio.ensure_future(outbox.next())
    await asyncio.sleep(0)
    assert not coming.done()
    outbox.put(letter(1, cut=CUT))
    assert await coming == letter(1, cut=CUT).wire
    outbox.put(letter(2, cut=CUT))
    outbox.close()
    assert await outbox.next() == letter(2, cut=CUT).wire
    assert await outbox.next() is None


# --- addresses

THREE = (WorkerId(4), WorkerId(7), WorkerId(5))


def said(*by_rank: str, scope: str = "/global") -> pb.Addresses:
    return addresses.from_member(scope, [text.encode() for text in by_rank])


def told(meeting: Rendezvous, worker: int, *by_rank: str) -> dict[int, list[str]]:
    """The messages to all when this one has reported its addresses, without their own places."""
    found = meeting.hear(WorkerId(worker), said(*by_rank))
    assert {(m.generation, m.addresses.scope) for _, m in found} <= {(meeting.generation, "/global")}
    rows = [(member, [a.decode() for a in addresses.by_rank(m.addresses)]) for member, m in found]
    return {member: row[:rank] + row[rank + 1 :] for rank, (member, row) in enumerate(rows)}


def test_each_member_is_told_where_the_others_await_it_once_all_have_said_so() -> None:
    meeting = Rendezvous()
    meeting.open(3, THREE)
    assert told(meeting, 7, "b:100.", "", "b:102.") == {}
    assert told(meeting, 4, "", "a:001.", "a:052.") == {}
    assert told(meeting, 5, "c:2000", "c:2111", "") == {
        4: ["b:100.", "c:2000"],
        7: ["a:001.", "c:2111"],
        5: ["a:052.", "b:102."],
    }


def test_what_was_said_in_another_generation_or_mesh_is_not_mixed_in() -> None:
    meeting = Rendezvous()
    meeting.open(3, THREE)
    for worker in (4, 7):
        meeting.hear(WorkerId(worker), said("x", "x", "x"))
    assert meeting.hear(WorkerId(5), said("y", "y", "y", scope="/other")) == []
    meeting.open(4, THREE)
    assert meeting.hear(WorkerId(5), said("z", "z", "")) == []


@given(st.integers(2, 6), st.data())
def test_whatever_differs_between_addresses_comes_through(size: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 12))
    one = st.lists(st.sampled_from(b"ab"), min_size=length, max_size=length).map(bytes)
    of_all = [[data.draw(one) if i != j else b"" for j in range(size)] for i in range(size)]
    meeting = Rendezvous()
    meeting.open(1, tuple(map(WorkerId, range(size))))
    *_, found = [meeting.hear(WorkerId(i), addresses.from_member("", row)) for i, row in enumerate(of_all)]
    for member, message in found:
        heard = addresses.by_rank(message.addresses)
        assert all(heard[other] == of_all[other][member] for other in range(size) if other != member)


@pytest.mark.parametrize(("worker", "by_rank"), [(9, ("a", "b", "c")), (4, ("", "b"))])
def test_a_stranger_and_too_few_addresses_are_refused(worker: int, by_rank: tuple[str, ...]) -> None:
    meeting = Rendezvous()
    meeting.open(3, THREE)
    with pytest.raises(ValueError, match="addresses in a ring of 3"):
        meeting.hear(WorkerId(worker), said(*by_rank))


@pytest.mark.parametrize("rank", range(4))
def test_what_gloo_puts_for_all_is_taken_apart_by_rank(rank: int) -> None:
    others = [f"{rank} to {other}".encode() for other in range(4) if other != rank]
    assert parts(b"".join(others), rank, 4) == [
        f"{rank} to {other}".encode() if other != rank else b"" for other in range(4)
    ]


def test_what_is_not_made_of_addresses_is_told() -> None:
    assert parts(b"", 0, 3) == parts(b"12345", 0, 3) == []
