# SPDX-License-Identifier: Apache-2.0
"""HOST:PORT, the format of addresses in options."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edl.errors import ConfigError


@dataclass(frozen=True)
class Address:
    """The address of a server.

    Args:
        host: a name or an address; empty: all addresses of this machine.
        port: 0: any that is free.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, option: str) -> Address:
        """Parse HOST:PORT.

        Args:
            option: name of the option, for error messages.

        Raises:
            ConfigError: `text` is not HOST:PORT.
        """
        found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]*):([0-9]{1,9})", text)
        if not found:
            raise ConfigError(f"{option} {text}: expected HOST:PORT, e.g. 127.0.0.1:8500")
        if (port := int(found[2])) > 65535:
            raise ConfigError(f"{option} {text}: port {port} is out of range (expected 0 to 65535)")
        return cls(found[1], port)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"
