"""What people ask of a release by hand (`edl scale`, `checkpoint`, `stop`): keys in the ConfigMap of its job.

The chart does not set these keys, so Helm leaves them alone: what was asked by hand and what the chart
says never overwrite each other. The chart has the last word on a number that it changes.

    scale.json   {"workers": 8, "instead": 4, "id": "5f0c..."}: so many, for as long as the chart says 4
    stop         the id of the run that is to end
    stop.json    {"run": "2b1c..", "id": "77aa...", "force": false}: that run is to end once its state is in a
                 checkpoint; with `force` also if that fails
    checkpoint.json  {"run": "2b1c..", "id": "9d31..."}: that run is to write a checkpoint now

Who has asked for the last two takes them away again, unless it was ended before: a master does each id once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from edl import config

SCALE, STOP = "scale.json", "stop"
FAREWELL, CHECKPOINT = "stop.json", "checkpoint.json"


@dataclass(frozen=True)
class Scale:
    """Another number of workers than the chart's.

    Args:
        instead: the chart's number when this one was asked for.
        id: of this asking; one that is over must not come back when the chart says its old number again.
    """

    workers: int
    instead: int
    id: str

    @classmethod
    def read(cls, data: Mapping[str, str]) -> Scale | None:
        """From the data of the job's ConfigMap; what is not sound is as if it were not there."""
        try:
            said = json.loads(data[SCALE])
            return cls(int(said["workers"]), int(said["instead"]), str(said["id"]))
        except (KeyError, TypeError, ValueError):
            return None

    def text(self) -> str:
        return json.dumps(asdict(self))

    def over(self, values: Mapping[str, Any]) -> str:
        """Why it does not hold any more with these values of the chart; empty while it does."""
        if values.get("workers") != self.instead:
            return f"the chart says {values.get('workers')} workers now"
        return "; ".join(config.unscalable(values, self.workers))


@dataclass(frozen=True)
class Asked:
    """A checkpoint of a run, or its end once there is one.

    Args:
        run: its id; what is asked of another run does not hold.
        id: of this asking.
        force: end it also if the checkpoint fails.
    """

    run: str
    id: str
    force: bool = False

    @classmethod
    def read(cls, data: Mapping[str, str], key: str) -> Asked | None:
        """From the data of the job's ConfigMap; what is not sound is as if it were not there."""
        try:
            said = json.loads(data[key])
            return cls(str(said["run"]), str(said["id"]), said.get("force") is True)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def text(self) -> str:
        return json.dumps(asdict(self))
