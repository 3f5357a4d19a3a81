# SPDX-License-Identifier: Apache-2.0
"""All durations and rates towards the Kubernetes API, in one value."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

from edl.errors import ConfigError


@dataclass(frozen=True)
class Timing:
    """All durations towards the API, in seconds. Tests scale them down."""

    answer: float = 15.0  # timeout of one request
    silence: float = 75.0  # timeout of a silent watch: a live one sends a bookmark every minute
    watch: float = 300.0  # longest watch; the shortest is 4/5 of it, so that their ends spread
    relist: float = 300.0  # longest time between two full lists, independently of the watches
    first_pause: float = 0.5  # pause after the first failure; it doubles with each failure
    most_pause: float = 30.0
    outage: float = 1.0  # between any two requests during an outage of the API
    write: float = 0.05  # one write's share of the budget: 20 per second (as in kube-controller-manager)
    burst: int = 40  # writes that need not wait for their share
    # Longest pause between creates that are refused (quota, rights). No event reports that a quota has room
    # again, so creates are retried; on average, a create then waits half of this time.
    blocked: float = 15.0
    mercy: float = 2.0  # for a worker whose stream has ended to exit by itself: its pod then keeps the log
    offer: float = 40.0  # for a new worker to take over a vacant pod: longer than any pause between crashes
    overdue: float = 30.0  # after the grace period: the node of a pod that has not ended does not answer
    untaken: float = 5.0  # for a kubelet to acknowledge a pod, on a node where a worker fell silent
    # Time for which a doubtful node is avoided. Kubernetes taints a node after 50 s of silence; from then on,
    # the taint is enough.
    doubt: float = 120.0
    look: float = 0.1  # between two checks of what must be published: it may change with every event
    status: float = 1.0  # between two writes of the status
    drift: float = 5.0  # between two writes of the status if only the progress has changed
    labels: float = (
        2.0  # between two checks of the workers' labels: a label is written once it is stable that long
    )
    restless_labels: float = 300.0  # an unstable label is written after this time nevertheless
    renew: float = 1.0  # between two renewals of the Lease while another master could take it
    # Since the request of the last renewal. After this time, the acting master is silent until the next one.
    fresh: float = 3.0
    stale: float = 4.0  # since the last observed renewal: a standby may act then. More than `fresh`
    handover: float = 3.0  # for a master that is asked to end to release the Lease
    events: float = 10.0  # one Event's share, beyond a burst; minor ones have a separate share of this size

    @classmethod
    def from_environment(cls) -> Timing:
        """The defaults, with the budget of writes from EDL_KUBERNETES_QPS and EDL_KUBERNETES_BURST, if set.

        Raises:
            ConfigError: a variable is not a number above 0.
        """
        usual = cls()
        qps = _number("EDL_KUBERNETES_QPS", 1 / usual.write)
        return replace(usual, write=1 / qps, burst=max(1, int(_number("EDL_KUBERNETES_BURST", usual.burst))))

    def times(self, factor: float) -> Timing:
        """All durations multiplied by `factor`."""
        spans = {f.name: getattr(self, f.name) * factor for f in fields(self) if f.name != "burst"}
        return replace(self, **spans)


def _number(variable: str, otherwise: float) -> float:
    text = os.environ.get(variable, "")
    try:
        number = float(text) if text else otherwise
    except ValueError:
        number = 0.0
    if number <= 0:
        raise ConfigError(f"{variable}: invalid value {text!r} (expected a number, more than 0)")
    return number
