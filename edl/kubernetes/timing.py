"""Every span of time towards the Kubernetes API, in one value: how long to wait, how often to ask."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

from edl.errors import ConfigError


@dataclass(frozen=True)
class Timing:
    """Every span of time towards the API, in seconds. Tests use a shorter second."""

    answer: float = 15.0  # for the answer to one request
    silence: float = 75.0  # of a watch: a live one brings a bookmark every minute
    watch: float = 300.0  # the longest watch; the shortest is 4/5 of it, so that they spread
    relist: float = 300.0  # a full list at least so often, whatever the watches said
    first_pause: float = 0.5  # after a failure, doubling
    most_pause: float = 30.0
    outage: float = 1.0  # between the requests of everybody while the API is out
    write: float = 0.05  # one write's share of the budget: 20 a second (as kube-controller-manager's)
    burst: int = 40  # writes that need not wait for their share
    # The longest pause between creates that are refused (quota, rights). Nobody tells when others leave
    # room in a quota, and what is asked for once in so many seconds waits half as long, on average.
    blocked: float = 15.0
    mercy: float = 2.0  # for a worker whose stream has ended to end by itself: its pod then keeps the log
    offer: float = (
        40.0  # for a place that has become vacant to be taken: longer than any pause between crashes
    )
    overdue: float = 30.0  # past its grace, and still not ended: its node does not answer
    untaken: float = 5.0  # for a kubelet to take a pod up, on a node where a worker fell silent
    # In doubt, and avoided. Kubernetes taints a node that is silent for 50 s; from there on that is enough.
    doubt: float = 120.0
    look: float = 0.1  # between two looks at what there is to be shown: it may change with every event
    status: float = 1.0  # between two writes of the status
    drift: float = 5.0  # the same when nothing but the progress has changed
    labels: float = (
        2.0  # between two looks at the workers' labels: what is to be written stays so long as it is
    )
    restless_labels: float = 300.0  # after which it is written nevertheless
    renew: float = 1.0  # between two renewals of the Lease while another master could take it
    # Since the last renewal was asked for; then the acting master says nothing more until the next one.
    fresh: float = 3.0
    stale: float = 4.0  # since a renewal was last seen: who stands by may act. More than `fresh`
    handover: float = 3.0  # for a master that is asked to end to give the Lease back
    events: float = 10.0  # one Event's share, beyond a burst; and the same once more for minor ones

    @classmethod
    def from_environment(cls) -> Timing:
        """With the budget of writes that EDL_KUBERNETES_QPS and EDL_KUBERNETES_BURST say, where they are set.

        Raises:
            ConfigError: they are not numbers above 0.
        """
        usual = cls()
        qps = _number("EDL_KUBERNETES_QPS", 1 / usual.write)
        return replace(usual, write=1 / qps, burst=max(1, int(_number("EDL_KUBERNETES_BURST", usual.burst))))

    def times(self, factor: float) -> Timing:
        """Everything so many times as long."""
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
