"""The book of leases: everything is handed out once, and what is lost comes back."""

import random

from hypothesis import given
from hypothesis import strategies as st

from edl.contract.ranges import RangeSet
from master.core.leases import LeaseBook


@given(st.integers(0, 300), st.integers(1, 3), st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**16))
def test_every_position_is_granted_once_whatever_is_lost(
    size: int, epochs: int, batch: int, members: int, seed: int
) -> None:
    chance = random.Random(seed)
    leases = LeaseBook(size, epochs)
    applied, held = RangeSet(), RangeSet()
    while not leases.complete:
        lease = leases.grant(members, batch, 4)
        if lease is None:
            assert held, "nothing is held and nothing is left, but the job is not complete"
            applied, held = applied.union(held), RangeSet()
            leases.progress(applied)
            continue
        held = held.add(*lease)  # raises when it is held already
        assert RangeSet((lease,)).minus(applied) == RangeSet((lease,)), "granted again"
        assert lease[1] <= leases.open[1]
        if chance.random() < 0.3:  # the ring breaks: some of what was held is applied, the rest lost
            start, stop = held.ranges[0]
            applied = applied.add(start, chance.randint(start, stop)) if start < stop else applied
            held = RangeSet()
            leases.rebase(applied, held)
    assert applied == RangeSet.of([(0, size * epochs)])


def test_leases_shrink_towards_the_end_of_an_epoch() -> None:
    leases, lengths = LeaseBook(1000, 1), []
    while lease := leases.grant(4, 8, 32):
        lengths.append(lease[1] - lease[0])
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 120
    assert lengths[-1] <= 8


def test_an_epoch_opens_when_the_one_before_is_wholly_applied() -> None:
    leases = LeaseBook(100, 2)
    while leases.grant(1, 10, 32):
        pass
    assert not leases.progress(RangeSet(((0, 99),)))
    assert leases.grant(1, 10, 32) is None
    assert leases.progress(RangeSet(((0, 100),)))
    lease = leases.grant(1, 10, 32)
    assert lease is not None
    assert lease[0] == 100


def test_an_empty_dataset_is_complete_at_once() -> None:
    assert LeaseBook(0, 5).complete


parts = st.lists(
    st.tuples(st.integers(0, 70), st.integers(0, 20)).map(lambda r: (r[0], r[0] + r[1])), max_size=5
)


@given(st.integers(1, 25), st.integers(1, 3), parts, parts)
def test_what_is_left_is_what_is_open_but_not_applied_and_not_held(
    size: int, epochs: int, applied: list[tuple[int, int]], held: list[tuple[int, int]]
) -> None:
    leases, total = LeaseBook(size, epochs), range(size * epochs)
    done = {p for a, b in applied for p in range(a, b)} & set(total)
    leases.rebase(RangeSet.of(applied).within(0, size * epochs), held)
    epoch = next((e for e in range(epochs) if not set(range((e + 1) * size)) <= done), epochs)
    open_now = set(range(min(epoch + 1, epochs) * size))
    assert leases.done_epochs == epoch
    assert leases.complete == (done == set(total))
    left = {p for a, b in leases.todo for p in range(a, b)}
    assert left == open_now - done - {p for a, b in held for p in range(a, b)}


@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 9), st.integers(1, 8))
def test_a_lease_is_whole_batches_but_for_the_last_and_no_more_than_is_fair(
    size: int, members: int, batch: int, most: int
) -> None:
    leases = LeaseBook(size, 1)
    while left := len(leases.todo):
        lease = leases.grant(members, batch, most)
        assert lease is not None
        length = lease[1] - lease[0]
        assert length % batch == 0 or not leases.todo
        assert length <= max(batch, min(most * batch, -(-left // (2 * members))))
    assert leases.grant(members, batch, most) is None
