# SPDX-License-Identifier: Apache-2.0
"""Manual requests to a release (`edl scale`, `checkpoint`, `stop`): keys in the ConfigMap of its job.

The chart does not set these keys, so Helm leaves them alone: manual requests and the chart's values never
overwrite each other. If the chart changes a number, the chart's number wins.

    scale.json   {"workers": 8, "instead": 4, "id": "5f0c..."}: 8 workers, as long as the chart sets 4
    stop         the id of the run to end
    stop.json    {"run": "2b1c..", "id": "77aa...", "force": false}: end that run once its state is in a
                 checkpoint; with `force` even if the checkpoint fails
    checkpoint.json  {"run": "2b1c..", "id": "9d31..."}: make that run write a checkpoint now

The requester of the last two removes them again, unless it was ended before: a master handles each id once.
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
    """A number of workers that replaces the chart's.

    Args:
        instead: the chart's number at the time of the request.
        id: id of this request. A request that is over must not revive if the chart returns to its old number.
    """

    workers: int
    instead: int
    id: str

    @classmethod
    def read(cls, data: Mapping[str, str]) -> Scale | None:
        """Read the request from the data of the job's ConfigMap; None if it is absent or invalid."""
        try:
            said = json.loads(data[SCALE])
            return cls(int(said["workers"]), int(said["instead"]), str(said["id"]))
        except (KeyError, TypeError, ValueError):
            return None

    def text(self) -> str:
        return json.dumps(asdict(self))

    def over(self, values: Mapping[str, Any]) -> str:
        """Why this request is over with these values of the chart; empty while it is in force."""
        if values.get("workers") != self.instead:
            return f"the chart says {values.get('workers')} workers now"
        return "; ".join(config.unscalable(values, self.workers))


@dataclass(frozen=True)
class Asked:
    """A request for a checkpoint of a run, or for the end of the run after a checkpoint.

    Args:
        run: id of the run; requests for a different run are ignored.
        id: id of this request.
        force: end the run even if the checkpoint fails.
    """

    run: str
    id: str
    force: bool = False

    @classmethod
    def read(cls, data: Mapping[str, str], key: str) -> Asked | None:
        """Read the request from the data of the job's ConfigMap; None if it is absent or invalid."""
        try:
            said = json.loads(data[key])
            return cls(str(said["run"]), str(said["id"]), said.get("force") is True)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def text(self) -> str:
        return json.dumps(asdict(self))
