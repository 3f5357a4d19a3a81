"""What waits to be sent to a worker, and how members learn where they await each other: `master.rpc`."""

from __future__ import annotations

import asyncio

import pytest

from edl.contract.ids import WorkerId
from edl.contract.proto import edl_pb2 as pb
from master.rpc.outbox import Letter, Outbox
from master.rpc.rendezvous import Rendezvous
from trainer.session.kvstore import addresses


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
        outbox.put(letter(generation, addresses=pb.Addresses(by_rank=[b"x" * 136] * 100)))
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


def said(*by_rank: bytes, scope: str = "/global") -> pb.Addresses:
    return pb.Addresses(scope=scope, by_rank=by_rank)


def test_each_member_is_told_where_the_others_await_it_once_all_have_said_so() -> None:
    meeting = Rendezvous()
    meeting.open(3, THREE)
    assert meeting.hear(WorkerId(7), said(b"1 to 0", b"", b"1 to 2")) == []
    assert meeting.hear(WorkerId(4), said(b"", b"0 to 1", b"0 to 2")) == []
    told = meeting.hear(WorkerId(5), said(b"2 to 0", b"2 to 1", b""))
    assert [(member, list(m.addresses.by_rank)) for member, m in told] == [
        (4, [b"", b"1 to 0", b"2 to 0"]),
        (7, [b"0 to 1", b"", b"2 to 1"]),
        (5, [b"0 to 2", b"1 to 2", b""]),
    ]
    assert {(m.generation, m.addresses.scope) for _, m in told} == {(3, "/global")}


def test_what_was_said_in_another_generation_or_mesh_is_not_mixed_in() -> None:
    meeting = Rendezvous()
    meeting.open(3, THREE)
    for worker in (4, 7):
        meeting.hear(WorkerId(worker), said(b"x", b"x", b"x"))
    assert meeting.hear(WorkerId(5), said(b"y", b"y", b"y", scope="/other")) == []
    meeting.open(4, THREE)
    assert meeting.hear(WorkerId(5), said(b"z", b"z", b"")) == []


@pytest.mark.parametrize(("worker", "by_rank"), [(9, (b"a", b"b", b"c")), (4, (b"", b"b"))])
def test_a_stranger_and_too_few_addresses_are_refused(worker: int, by_rank: tuple[bytes, ...]) -> None:
    meeting = Rendezvous()
    meeting.open(3, THREE)
    with pytest.raises(ValueError, match="addresses in a ring of 3"):
        meeting.hear(WorkerId(worker), said(*by_rank))


@pytest.mark.parametrize("rank", range(4))
def test_what_gloo_puts_for_all_is_taken_apart_by_rank(rank: int) -> None:
    others = [f"{rank} to {other}".encode() for other in range(4) if other != rank]
    parts = addresses(b"".join(others), rank, 4)
    assert parts == [f"{rank} to {other}".encode() if other != rank else b"" for other in range(4)]


def test_what_is_not_made_of_addresses_is_told() -> None:
    assert addresses(b"", 0, 3) == addresses(b"12345", 0, 3) == []
