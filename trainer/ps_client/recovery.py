"""What parameter servers have told of themselves when a generation was claimed, and what follows from it:
which of them have the rows of a step, in which arrangement, and if not all rows are there, why.

Promise: it is arithmetic. Nothing is asked and nobody is waited for, and the same answers give the same
arrangement and the same words, whichever root has them. The calls are in trainer/ps_client/client.py.

Steps of a ring (mode=hybrid): `Positions.which`. Steps in any order (mode=ps): `going`.

Who was away when the rows moved still speaks of where they were. So of what servers say of an arrangement,
only what those say counts that are in the newest generation: before rows move, all who have them are in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import Arrangement
from edl.trainer.embedding.interfaces import Commit


@dataclass(frozen=True, slots=True)
class Positions:
    """
    Args:
        found: where each server is that has answered, by index.
        away: those that have not, and can be done without.
    """

    found: Mapping[int, pb.Position] = field(default_factory=dict)
    away: tuple[int, ...] = ()

    @property
    def generation(self) -> int:
        """The newest that any of them knows; 0: none does."""
        return max((position.generation for position in self.found.values()), default=0)

    @property
    def needed(self) -> int:
        """How many servers may have rows that count."""
        if (whole := self._whole) is not None:
            return whole.servers
        ready = [position.ready.servers for position in self.found.values()]
        return max([one.servers for one in self._arrangements()] + ready, default=0)

    @property
    def newest(self) -> Arrangement | None:
        """The arrangement in which they are that are in the newest generation; None: nobody says so."""
        newest = max(self._arranged(), key=lambda position: position.generation, default=None)
        return None if newest is None else Arrangement.of(newest.arrangement)

    @property
    def lost(self) -> list[int]:
        """The servers that have neither log nor rows."""
        return [index for index, position in self.found.items() if position.empty]

    def may_be_on(self, servers: Iterable[int]) -> bool:
        """Whether any of these servers, which have not answered, may have rows that count: one that was only
        to be a further one has none."""
        known, some = self._arrangements(), {*servers}
        if not some or self._whole is not None:
            return False
        ready = any(position.HasField("ready") for position in self.found.values())
        return ready or not known or any(some & {*one.members} for one in known)

    def which(self, step: int, wanted: Arrangement, last: Commit | None) -> tuple[Arrangement, str]:
        """The arrangement in which servers have the rows of a step, or can have them.

        Args:
            step: of the ring.
            wanted: where the rows are to be: this one, if it may be.
            last: what became of the step before, as who has the state knows it; None: there was none.

        Returns:
            the arrangement, without the servers that have nothing that counts.
            if it is not whole, why; may be empty, where servers are just away.
        """
        positions = self.found.values()
        told = {Arrangement.of(p.arrangement) for p in positions if p.HasField("arrangement")}
        told |= {Arrangement.of(p.ready) for p in positions if p.HasField("ready")}
        found: list[tuple[bool, Arrangement, str]] = []
        # The one that is wanted, if it may be; else the one in which more is there.
        for one in sorted(told or {wanted}, key=lambda a: (a != wanted, -len(a.members))):
            reasons = {
                index: why
                for index in one.members
                if (why := self.why_not(index, one, step, last)) is not None
            }
            if not reasons and one.is_whole:
                return one, ""
            left = one.without(tuple(reasons))
            found.append((left.is_whole, left, "; ".join(filter(None, reasons.values()))))
        _, left, why = max(found, key=lambda each: each[0])  # the first of them
        return left, why

    def why_not(self, index: int, of: Arrangement, step: int, last: Commit | None) -> str | None:
        """Why a server has not what an arrangement gives it, at this step. None: it has; empty: it is away,
        and can be done without."""
        position = self.found.get(index)
        if position is None:
            return f"parameter server {index} is away" if index not in self.away else ""
        is_ready = position.HasField("ready")
        if position.empty and not is_ready:
            return f"parameter server {index} has lost its log and rows"
        if is_ready and Arrangement.of(position.ready) == of and position.ready_step == step:
            return None
        mine = Arrangement.of(position.arrangement) if position.HasField("arrangement") else of
        if position.empty or (of.held(index) & ~mine.held(index)).any():
            return f"parameter server {index} has not all rows of {of}"
        if last is not None and position.generation < last.generation:
            return f"parameter server {index} was not in the last ring"
        if has_dropped(position, step, last):
            return f"parameter server {index} has dropped what was staged for step {step:,}"
        if not step - 1 <= position.step <= step + 1:
            return why_behind(index, position, step)
        return None

    @property
    def _whole(self) -> Arrangement | None:
        """The newest arrangement, if all of its servers have answered and are in it: no others are needed
        then, whatever these were once made ready for."""
        if (newest := self.newest) is None or not newest.is_whole:
            return None
        told = (self.found.get(index, pb.Position()) for index in newest.members)
        in_it = (
            p.HasField("arrangement") and not p.empty and Arrangement.of(p.arrangement) == newest
            for p in told
        )
        return newest if all(in_it) else None

    def _arranged(self) -> list[pb.Position]:
        return [position for position in self.found.values() if position.HasField("arrangement")]

    def _arrangements(self) -> list[Arrangement]:
        """In which they are, as those say that are in the newest generation of any that has rows."""
        said = self._arranged()
        newest = max((position.generation for position in said), default=0)
        return [Arrangement.of(position.arrangement) for position in said if position.generation == newest]


@dataclass(frozen=True, slots=True)
class Going:
    """In which arrangement servers go on whose steps come in any order (mode=ps).

    Args:
        arrangement: without the servers that have not what it gives them.
        since: the generation in which they went over to it; 0: they do so now.
        fetched: the one in which rows were fetched for it.
        missing: if no others have their rows, the servers that lack some.
    """

    arrangement: Arrangement
    since: int = 0
    fetched: int = 0
    missing: tuple[int, ...] = ()


def going(found: Mapping[int, pb.Position]) -> Going | None:
    """As servers say that stand still; None: none of them has any rows.

    The one that has gone over last knows the arrangement. No step is made in it before all are in it: so
    who has what it gives him, of the one before or fetched, has what counts. A server that was left out is
    not one of its members.
    """
    have = {index: position for index, position in found.items() if not position.empty}
    if not have:
        return None
    newest = have[max(have, key=lambda index: (have[index].arranged, -index))]
    of, since = Arrangement.of(newest.arrangement), newest.arranged
    if of.copies < 2:
        return Going(of, since, since)
    lacking = tuple(index for index in of.members if not _goes_over(index, found.get(index), of, since))
    if not lacking:
        return Going(of, since, since)
    left = of.without(lacking)
    return Going(left, 0, since) if left.is_whole else Going(of, since, since, lacking)


def _goes_over(index: int, position: pb.Position | None, to: Arrangement, since: int) -> bool:
    """Whether a server has what an arrangement gives it, to which others went over in this generation."""
    if position is None:
        return False
    ready = Arrangement.of(position.fetched) if position.HasField("fetched") else None
    if ready is not None and position.fetched_in == since and ready.servers == to.servers:
        return bool((ready.held(index) >= to.held(index)).all())
    there = Arrangement.of(position.arrangement)
    return not position.empty and bool((there.held(index) >= to.held(index)).all())


def has_dropped(position: pb.Position, step: int, last: Commit | None) -> bool:
    """Whether a server that lacks the last step has not got its gradients any more: another ring, without
    this worker, has gone on from the step before."""
    if position.step != step - 1 or position.empty:
        return False
    return last is None or last.generation != position.generation


def why_behind(index: int, position: pb.Position, step: int) -> str:
    """Why a ring at this step cannot go on with a server that is there; empty: it can."""
    if position.empty and step:
        return f"parameter server {index} has lost its log and rows"
    if position.step != step:
        return f"parameter server {index} is at step {position.step:,}, the ring at step {step:,}"
    return ""
