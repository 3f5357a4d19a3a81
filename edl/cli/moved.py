# SPDX-License-Identifier: Apache-2.0
"""Commands that were renamed: for one version, an old name is refused with the new one.

Each class is the `cls` of a group of commands. Remove this module in the version after `SINCE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from edl.cli.shared.groups import Group
from edl.errors import ConfigError

SINCE = "0.2.0"


class Renamed(Group):
    """A group some of whose commands have moved to a different group."""

    moved: ClassVar[Mapping[str, str]] = {}  # the new commands, by the old name
    path = "edl"

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of these arguments.

        Raises:
            ConfigError: it was renamed.
        """
        if (new := self.moved.get(args[0])) and not ctx.resilient_parsing:
            raise ConfigError(_renamed(f"{self.path} {args[0]}", new))
        return super().resolve_command(ctx, args)


class RootGroup(Renamed):
    """`edl`."""

    moved: ClassVar = {
        "checkpoints": "edl checkpoint list, and with --verify: edl checkpoint verify",
        "export": "edl model export",
    }


class ZooGroup(Renamed):
    """`edl zoo`."""

    moved: ClassVar = {name: f"edl image {name}" for name in ("init", "build", "push")}
    path = "edl zoo"


class CheckpointGroup(Group):
    """`edl checkpoint`, which was a command itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options of the group.

        Raises:
            ConfigError: the arguments are those of the earlier command.
        """
        known = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        if not known and not ctx.resilient_parsing:  # a shell completes the group without arguments
            raise ConfigError(_renamed("edl checkpoint", "edl checkpoint create (or list, verify)"))
        return super().parse_args(ctx, args)


def _renamed(old: str, new: str) -> str:
    return f"`{old}` was renamed in {SINCE}: {new}"
