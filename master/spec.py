# SPDX-License-Identifier: Apache-2.0
"""A job's values, validated once where they enter the process; all other modules receive the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from edl import config as config_module
from edl.config import Config
from edl.config.messages import shown
from edl.contract import modes
from edl.errors import ConfigError

FILES = {"model.source", "model.script"}  # whole files, so messages name the key only


@dataclass(frozen=True)
class JobSpec:
    """The specification of a job.

    Args:
        values: as they were written; journal, status and workers receive these.
        config: the validated configuration.
    """

    values: dict[str, Any]
    config: Config

    @classmethod
    def parse(cls, values: dict[str, Any]) -> JobSpec:
        """Validate the values of a job.

        Raises:
            ConfigError: the values are invalid; one line for each mistake.
        """
        return cls(values, config_module.parse(values))

    def decided(self, mode: str) -> JobSpec:
        """Return this spec with the decided mode of a job with mode=auto, so that it is not decided again."""
        if self.config.is_decided or not modes.became(self.config.mode, mode) or mode == modes.AUTO:
            return self
        return JobSpec({**self.values, "mode": mode}, self.config.decided(mode))

    def frozen_changes(self, other: JobSpec, ended: bool = False) -> list[str]:
        """Return the dotted keys in which `other` differs and that a run with this spec keeps.

        Args:
            ended: the run has ended.
        """
        return config_module.frozen_changes(self.config, other.config, ended)

    def with_live_values(self, wanted: Wanted) -> tuple[JobSpec, str]:
        """Return this spec with the live values of `wanted`, and a description of the refused values.

        Each key is checked by itself: a frozen value that differs, or is invalid, does not prevent a live
        value from being applied. Live values are refused together if their combination is invalid.
        """
        live = config_module.live_keys(self.config)
        mixed = checked(config_module.with_keys_of(self.values, wanted.values, live))
        refused = f"the new values are refused: {wanted.why}" if isinstance(wanted, Invalid) else ""
        if isinstance(wanted, JobSpec):
            refused = self.refusal(wanted)
            if isinstance(mixed, Invalid):
                refused = "; ".join(filter(None, [refused, f"the new values are refused: {mixed.why}"]))
        return (self if isinstance(mixed, Invalid) else mixed.decided(self.config.mode)), refused

    def refused_in_pod(self, wanted: Wanted) -> list[str]:
        """Return the dotted keys whose refused change is also in the chart's rendered pod of a worker."""
        ours, theirs = config_module.flat(self.config), config_module.flat(wanted.values)
        return sorted(key for key in config_module.IN_POD if theirs.get(key, ours[key]) != ours[key])

    def refusal(self, wanted: JobSpec, ended: bool = False) -> str:
        """Describe the values of `wanted` that a run with this spec refuses; empty if it refuses none.

        Args:
            ended: the run has ended.
        """
        if not (keys := self.frozen_changes(wanted, ended)):
            return ""
        ours, theirs = config_module.flat(self.config), config_module.flat(wanted.config)
        changes = ", ".join(
            key if key in FILES else f"{key} {shown(ours[key])} -> {shown(theirs[key])}" for key in keys
        )
        whose = "a run that has ended" if ended else "a running job"
        return f"{whose} keeps its values: {changes} refused; revert this, or set another runId for a new run"


@dataclass(frozen=True)
class Invalid:
    """Invalid values of a job.

    Args:
        why: one line for each mistake.
        values: as they were written; empty if they could not be read.
    """

    why: str
    values: dict[str, Any] = field(default_factory=dict)


Wanted: TypeAlias = JobSpec | Invalid


def checked(values: dict[str, Any]) -> Wanted:
    """Validate values; return `Invalid` instead of raising an error."""
    try:
        return JobSpec.parse(values)
    except ConfigError as error:
        return Invalid(str(error), values)
