# SPDX-License-Identifier: Apache-2.0
"""Cutting texts to a size limit: the API counts bytes, not characters."""

from __future__ import annotations

ELLIPSIS = "..."


def cut(text: str, most: int) -> str:
    """Cut the text to at most `most` bytes in UTF-8."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= most:
        return text
    return encoded[: most - len(ELLIPSIS)].decode("utf-8", "ignore") + ELLIPSIS
