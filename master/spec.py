"""A job's values, checked once: where they enter the process. Everybody else is handed the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from edl import config as config_module
from edl.config import Config
from edl.config.messages import shown
from edl.contract import modes
from edl.errors import ConfigError

SOURCE = "model.source"  # a whole file: named, not shown


@dataclass(frozen=True)
class JobSpec:
    """What a job is to be.

    Args:
        values: as they were written; journal, status and workers are given these.
        config: what they mean.
    """

    values: dict[str, Any]
    config: Config

    @classmethod
    def parse(cls, values: dict[str, Any]) -> JobSpec:
        """
        Raises:
            ConfigError: the values are invalid; one line for each mistake.
        """
        return cls(values, config_module.parse(values))

    def decided(self, mode: str) -> JobSpec:
        """The same, of a job that has become one of this mode: who is given these values decides nothing."""
        if self.config.is_decided or not modes.became(self.config.mode, mode) or mode == modes.AUTO:
            return self
        return JobSpec({**self.values, "mode": mode}, self.config.decided(mode))

    def frozen_changes(self, other: JobSpec, ended: bool = False) -> list[str]:
        """The dotted keys in which `other` differs and that a run with this spec keeps.

        Args:
            ended: the run has ended.
        """
        return config_module.frozen_changes(self.config, other.config, ended)

    def taking(self, wanted: Wanted) -> tuple[JobSpec, str]:
        """This spec with the live values of `wanted`, and what of `wanted` is refused, in words.

        Each key is judged by itself: a frozen value that differs, or is invalid, does not keep a live one
        from being applied. Live values are refused together where they would be an invalid combination.
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
        """The dotted keys whose refused change is also in the worker's pod that the chart has rendered."""
        ours, theirs = config_module.flat(self.config), config_module.flat(wanted.values)
        return sorted(key for key in config_module.IN_POD if theirs.get(key, ours[key]) != ours[key])

    def refusal(self, wanted: JobSpec, ended: bool = False) -> str:
        """Which values of `wanted` a run with this spec refuses, in words; empty: none.

        Args:
            ended: the run has ended.
        """
        if not (keys := self.frozen_changes(wanted, ended)):
            return ""
        ours, theirs = config_module.flat(self.config), config_module.flat(wanted.config)
        changes = ", ".join(
            key if key == SOURCE else f"{key} {shown(ours[key])} -> {shown(theirs[key])}" for key in keys
        )
        whose = "a run that has ended" if ended else "a running job"
        return f"{whose} keeps its values: {changes} refused; revert this, or set another runId for a new run"


@dataclass(frozen=True)
class Invalid:
    """Values that are no job.

    Args:
        why: one line for each mistake.
        values: as they were written; empty if they could not be read.
    """

    why: str
    values: dict[str, Any] = field(default_factory=dict)


Wanted: TypeAlias = JobSpec | Invalid


def checked(values: dict[str, Any]) -> Wanted:
    """What somebody wants, whether or not it can be."""
    try:
        return JobSpec.parse(values)
    except ConfigError as error:
        return Invalid(str(error), values)
