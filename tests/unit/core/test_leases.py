# SPDX-License-Identifier: Apache-2.0
"""The book of leases: to do, held and done are together all records, after every event."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edl.contract.ids import WorkerId
from edl.contract.ranges import RangeSet
from edl.master.core.leases import LeaseBook

A, B = WorkerId(1), WorkerId(2)


def test_ranges_are_granted_in_turn_and_done_by_who_holds_them() -> None:
    book = LeaseBook(10)
    assert book.grant(A, 4) == (0, 4)
    assert book.grant(B, 4) == (4, 8)
    assert not book.done(B, (0, 4)), "a different worker's"
    assert book.done(A, (0, 2)) and book.done(A, (2, 4)) and book.done(B, (4, 8))
    assert not book.done(A, (0, 4)), "done twice"
    assert book.grant(A, 4) == (8, 10) and book.grant(A, 4) is None
    assert not book.complete
    assert book.done(A, (8, 10)) and book.complete


def test_what_a_lost_worker_held_is_handed_out_again_and_what_it_did_is_not() -> None:
    book = LeaseBook(6)
    assert book.grant(A, 4) == (0, 4)
    assert book.done(A, (0, 1))
    book.lost(A)
    assert not book.done(A, (1, 4)), "it is lost, and what it says comes too late"
    assert [book.grant(B, 10) for _ in range(2)] == [(1, 6), None]
    assert book.done(B, (1, 6)) and book.complete


def test_without_records_there_is_nothing_to_do() -> None:
    assert LeaseBook(0).complete
    assert LeaseBook(0).grant(A, 1) is None


Moves = st.lists(st.tuples(st.sampled_from(["grant", "done", "lost"]), st.integers(0, 3), st.integers(1, 9)))


@given(st.integers(0, 60), Moves)
def test_every_record_is_done_once_whoever_is_lost(records: int, moves: list[tuple[str, int, int]]) -> None:
    book, counts = LeaseBook(records), [0] * records
    for move, number, count in [*moves, *[("grant", 9, 9), ("done", 9, 9)] * records]:
        worker = WorkerId(number)
        match move:
            case "grant":
                book.grant(worker, count)
            case "lost" if number != 9:
                book.lost(worker)
            case "done" if held := list(book.held.get(worker, ())):
                start, stop = held[0][0], min(held[0][1], held[0][0] + count)
                assert book.done(worker, (start, stop))
                for record in range(start, stop):
                    counts[record] += 1
    for other in range(9):
        book.lost(WorkerId(other))
    while (lease := book.grant(WorkerId(9), 7)) is not None:
        assert book.done(WorkerId(9), lease)
        for record in range(*lease):
            counts[record] += 1
    while held := list(book.held.get(WorkerId(9), RangeSet())):
        assert book.done(WorkerId(9), held[0])
        for record in range(*held[0]):
            counts[record] += 1
    assert counts == [1] * records and book.complete
