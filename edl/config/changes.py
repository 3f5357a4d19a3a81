# SPDX-License-Identifier: Apache-2.0
"""What may change while a job runs, and why a change is refused.

A value may change if its field in `edl.config.job` is marked as live. All other values keep what the run
began with: its processes have read them, or its pods were made from them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from edl.config.job import Config, flat
from edl.config.rules import impossible
from edl.config.types import Section
from edl.contract import modes
from edl.contract.modes import MAX_SERVERS

IN_POD = frozenset(
    {  # frozen values that the chart also writes into the worker's pod
        *(
            f"{place}.{key}"
            for place in ("model", "data")
            for key in ("existingClaim", "hostPath", "mountPath")
        ),
        *(f"checkpoint.{key}" for key in ("dir", "existingClaim", "hostPath", "existingSecret")),
        "elastic.prefork",
    }
)


def unscalable(values: Mapping[str, Any], workers: int) -> list[str]:
    """Why a running job with these values cannot be scaled to `workers` workers; empty if it can."""
    if workers < 0:
        return [f"workers is {workers}: expected at least 0, which suspends the job"]
    limits = {key: values[key] for key in ("minWorkers", "maxWorkers") if key in values}
    deterministic = values.get("training", {}).get("deterministic", False)
    return impossible({**limits, "training.deterministic": deterministic, "workers": workers})


def unscalable_servers(config: Config, servers: int) -> list[str]:
    """Why a running job cannot be scaled to `servers` parameter servers; empty if it can."""
    if not (config.servers and config.trains):
        why = "it has no parameter servers"
        if not config.is_decided:
            why = "no worker has built its model yet, so it is not known whether it needs any"
        return [f"ps.servers: cannot scale the servers of this job: {why}"]
    if not 1 <= servers <= MAX_SERVERS:
        return [f"ps.servers is {servers}: expected 1 to {MAX_SERVERS}"]
    return impossible({**flat(config), "ps.servers": servers})


def frozen_changes(old: Config, new: Config, ended: bool = False) -> list[str]:
    """The dotted keys that differ and that a run with the values `old` keeps.

    Args:
        ended: the run has ended, so it also keeps live values that determine the trained model.
    """
    if modes.became(new.mode, old.mode):
        new = new.decided(old.mode)
    before, after = flat(old), flat(new)
    free = live_keys(old, ended)
    return sorted(key for key in before if before[key] != after[key] and key not in free)


def live_keys(config: Config, ended: bool = False) -> set[str]:
    """The dotted keys that can change while a job with this configuration runs.

    Args:
        ended: the run has ended; leave out the keys that determine the trained model.
    """
    live = {key for key, extra in _extras(Config) if "live" in extra and not (ended and "result" in extra)}
    if config.is_decided and not (config.servers and config.trains):  # no rows that servers could exchange
        live.discard("ps.servers")
    return live


def with_keys_of(
    values: Mapping[str, Any], other: Mapping[str, Any], keys: Collection[str]
) -> dict[str, Any]:
    """A copy of `values` in which these dotted keys have the values of `other`, as far as it has them.

    `other` need not be valid.
    """
    found = copy.deepcopy(dict(values))
    for key in keys:
        *sections, last = key.split(".")
        into: Any = found
        source: Any = other
        for section in sections:
            into = into.setdefault(section, {})
            source = source.get(section) if isinstance(source, Mapping) else None
        if isinstance(source, Mapping) and last in source:
            into[last] = copy.deepcopy(source[last])
    return found


def _extras(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each dotted key with the extra schema properties of its field."""
    for field in section.model_fields.values():
        yield f"{prefix}{field.alias}", _extra(field)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _extras(field.annotation, f"{prefix}{field.alias}.")


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
