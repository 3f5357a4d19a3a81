"""What a simulated worker and a simulated ring consist of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edl.contract.ids import Generation, WorkerId
from edl.contract.ranges import RangeSet
from master.core import events as ev

NOTHING = RangeSet()
NO_RING = Generation(0)


@dataclass(eq=False)
class Collective:
    """A ring among simulated workers. Once broken it stays so."""

    form: ev.Form
    entered: set[WorkerId] = field(default_factory=set)
    broken: bool = False

    @property
    def generation(self) -> Generation:
        return self.form.generation


@dataclass(eq=False)
class Sim:
    """One simulated worker: what a real one keeps, and what is happening to it."""

    id: WorkerId
    weights: np.ndarray
    # its process
    alive: bool = True
    placed: bool = False
    frozen: bool = False
    greeted: bool = False  # its stream is open
    is_ready: bool = False
    stopping: bool = False
    failed: bool = False  # it has said its last words
    own_end: bool = False  # it ended by its own doing
    fenced: bool = False  # by the master: nothing that it says is heard
    silent_since: float | None = None  # it could not be heard, until
    audible_at: float = 0.0
    to_do: list[Callable[[], None]] = field(default_factory=list)  # when it thaws
    # its streams, both ordered
    master: int = 0  # which master it speaks to
    inbox_at: float = 0.0
    outbox_at: float = 0.0
    # what the trainer keeps
    has_state: bool = False
    step: int = 0
    applied: RangeSet = NOTHING
    leases: RangeSet = NOTHING
    asked: bool = False
    stepped: bool = False
    failing: bool = False  # its collective has failed, it is on its way out
    leave: Generation = NO_RING
    was_cut: Generation = NO_RING
    ring: Collective | None = None
    safe: RangeSet | None = None  # what a beat tells; rank 0 only
    told: RangeSet = NOTHING
    # what its link remembers for another master
    form: ev.Form | None = None
    up: bool = False
    last_out: ev.LeftRing | None = None
