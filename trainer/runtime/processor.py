# SPDX-License-Identifier: Apache-2.0
"""The processor's instructions: libraries choose their kernels by them, and kernels round differently."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def vector_instructions() -> list[str]:
    """The processor's instructions that a library may choose kernels by; empty if they are unknown."""
    lines = list[str]()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    return sorted(flag for flag in flags if flag.startswith(("avx", "amx", "fma", "sse4", "sve", "asimd")))
