# SPDX-License-Identifier: Apache-2.0
"""The trial of a user's own loop: whether its state holds all that a step changes and all that it uses.

    turn   step.mean returns       the state
    1      None                    must not change
    2      its gradients           first ─▶ second
    3      a part of them          second ─▶ third
    4      the same as in turn 3   the second is put back, as a new worker receives it ─▶ the third again

All turns have the same records and seeds. So turn 4 must compute the gradients of turn 3, and make the same
third state. Otherwise a new worker would make other steps than the workers that send it the state: the loop
has bound a new array to a name, and `state` holds the old one, or the variables of an optimizer are missing.
Turns 3 and 4 return smaller gradients than turn 2, because with equal ones Adam's first steps are equal, too,
whether its slots are kept or not.

Gradients that differ between turns 1 and 2 already, as of a loop with random numbers, are not compared.
"""

from __future__ import annotations

import numpy as np

from edl.errors import ModelError
from edl.trainer.model.loop_state import METRICS, MISSING, REPLACED, LoopState, named
from edl.trainer.step.turns import Given

# The gradients that turns 3 and 4 return are smaller by this factor. Neither it nor its square is a usual
# value of 1 - decay: such an average would not change in these turns.
SCALE = 0.23
TOLERANCE = 1e-4  # relative difference of gradients that rounding can explain
MAX_NOISE = 1e-2  # relative difference of the gradients of one state beyond which they are random
NOISE = 8  # times the difference of the gradients of one state is still taken for noise
UPDATE = 1e-3  # relative difference of an update that rounding can explain
PUT_BACK = "edl put the state of a trial step back, as a new worker receives it, and repeated the step:"
MAX_NAMED = 5  # gradients in a message


class LoopTrial:
    """What a loop computes in the turns of its trial.

    Args:
        state: the loop's state.
        where: the line of the user's code that has called `edl.join`.
    """

    def __init__(self, state: LoopState, where: str):
        self._state, self._at = state, f" (edl.join(): {where})"
        self._given: list[Given] = []  # in each turn
        self._states: list[dict[str, np.ndarray]] = []  # by name, before turn 2, and after turns 2, 3 and 4

    def begin(self, whole: bool) -> int:
        """Note the state before turn 2. Returns the number of turns that follow.

        Args:
            whole: whether turns 3 and 4 are made, too.
        """
        self.changed()
        return 3 if whole else 1

    def gave(self, given: Given) -> tuple[Given, float]:
        """Note what a turn has computed.

        Returns:
            the gradients that step.mean() returns, and a factor for them.
        """
        kept = [None if g is None else np.array(g, np.float32) for g in given.gradients]
        self._given.append(Given(kept, given.loss, given.metrics))
        return self._given[min(len(self._given), 2) - 1], 1.0 if len(self._given) <= 2 else SCALE

    def changed(self) -> None:
        """Note the state between two turns, and put the second state back before turn 4."""
        self._states.append(dict(zip(self._state.names, self._state.arrays(), strict=True)))
        if len(self._states) == 3:
            self._put_back(1)

    def end(self) -> None:
        """Restore the state, and compare turns 3 and 4, if they were made.

        Raises:
            ModelError: they differ; the text names what does, and what to write.
        """
        self._put_back(0)
        self._state.settle()
        if len(self._states) == 4:
            self._judge()

    def _put_back(self, nth: int) -> None:
        self._state.restore(self._states[nth])

    def _judge(self) -> None:
        if different := self._different_gradients():
            numbers = ", ".join(map(str, different[:MAX_NAMED]))
            found = f"it computed different gradients (number {numbers} of step.mean())"
            if still := self._still():
                raise ModelError(
                    f"{PUT_BACK} {found}, and {named(still)} did not change. So {REPLACED}{self._at}"
                )
        elif names := self._different_updates():
            found = f"the same mean changed {named(names)} differently"
        else:
            return
        raise ModelError(
            f"{PUT_BACK} {found}. So {MISSING}; add it{self._at}, or compute it from step.number"
        )

    def _different_gradients(self) -> list[int]:
        """The gradients, by number, that a state does not determine though it should."""
        found = []
        for nth, (one, two, three, four) in enumerate(
            zip(*(given.gradients for given in self._given), strict=True)
        ):
            if one is None or two is None or three is None or four is None:
                continue
            noise = _difference(one, two)
            if noise > MAX_NOISE:
                return []  # random: the others may depend on the same numbers
            if _difference(three, four) > max(TOLERANCE, NOISE * noise):
                found.append(nth)
        return found

    def _different_updates(self) -> list[str]:
        """The variables that the same mean has changed otherwise."""
        _, second, third, again = self._states
        found = []
        for name, two in again.items():
            before, one = (values.get(name, np.zeros_like(two)) for values in (second, third))
            if before.shape != two.shape or one.shape != two.shape:
                found.append(name)  # one turn has made a variable, and the other one has not
            elif not np.array_equal(one, two, equal_nan=one.dtype.kind in "fc") and _differ(before, one, two):
                found.append(name)
        return found

    def _still(self) -> list[str]:
        """Variables with the shape of a gradient, not zero, that no turn has changed."""
        shapes = {len(g) for g in self._given[1].gradients if g is not None and g.any()}
        first, second, third, _ = self._states
        found = []
        for name in first:
            if name == METRICS:
                continue
            values = [state[name] for state in (first, second, third)]
            one, two, three = (value.tobytes() for value in values)
            is_number = not values[0].ndim or values[0].dtype.kind not in "fcV"  # a learning rate, a counter
            if values[0].size in shapes and one == two == three and not is_number:
                found.append(name)
        return found


def _difference(one: np.ndarray, two: np.ndarray) -> float:
    """The greatest difference relative to the greatest value; 0 if a value is not finite."""
    if not one.size:
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        off = float(np.abs(one - two).max())
    scale = float(max(np.abs(one).max(), np.abs(two).max()))
    return off / scale if off and np.isfinite(scale) else 0.0


def _differ(before: np.ndarray, one: np.ndarray, two: np.ndarray) -> bool:
    """Whether two updates of the same values differ by more than rounding."""
    if one.dtype.kind not in "fcV":
        return True
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    before, one, two = (values.astype(wide) for values in (before, one, two))
    with np.errstate(invalid="ignore", over="ignore"):
        off, scale = np.abs(one - two).max(), np.abs(one - before).max()
    return bool(off > max(UPDATE * scale, np.finfo(np.float32).eps * np.abs(one).max()))
