"""A job's values, checked once: where they enter the process. Everybody else is handed the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from edl import config as config_module
from edl.config import Config
from edl.contract import modes
from edl.errors import ConfigError


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
        """The dotted keys in which `other` differs and that cannot change while a job runs; when it has
        `ended`, those with which it would be another run."""
        return config_module.frozen_changes(self.config, other.config, ended)


@dataclass(frozen=True)
class Invalid:
    """Values that are no job, and why: one line for each mistake."""

    why: str


Wanted: TypeAlias = JobSpec | Invalid


def checked(values: dict[str, Any]) -> Wanted:
    """What somebody wants, whether or not it can be."""
    try:
        return JobSpec.parse(values)
    except ConfigError as error:
        return Invalid(str(error))
