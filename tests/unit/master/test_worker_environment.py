# SPDX-License-Identifier: Apache-2.0
"""What the processes of workers are started with."""

from __future__ import annotations

import os
import platform
import subprocess

import pytest

from edl.contract.workers import (
    ASKED_BACKEND,
    MALLOC,
    WORKER_ENVIRONMENT,
    worker_environment,
)

LOADER = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}


def tunables(environment: dict[str, str]) -> dict[str, str]:
    """As glibc has understood them."""
    command = [LOADER[platform.machine()], "--list-tunables"]
    told = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=True)
    lines = (line.partition(": ") for line in told.stdout.decode().splitlines())
    return {name: value.partition(" ")[0] for name, _, value in lines}


def test_malloc_keeps_what_the_next_step_needs() -> None:
    found = tunables(worker_environment({}))
    asked = {
        "trim_threshold": 256 << 20,
        "mmap_threshold": 32 << 20,
        "hugetlb": 1,
        "arena_max": 1,
    }
    assert {name: int(found[f"glibc.malloc.{name}"], 0) for name in asked} == asked


@pytest.mark.parametrize("name", [MALLOC, "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_"])
def test_who_has_set_how_malloc_works_is_not_contradicted(name: str) -> None:
    given = {"HOME": "/", name: "1"}
    assert worker_environment(given) == WORKER_ENVIRONMENT


def test_another_backend_of_keras_is_overridden_and_remembered() -> None:
    found = worker_environment({"KERAS_BACKEND": "torch"})
    assert (found["KERAS_BACKEND"], found[ASKED_BACKEND]) == ("tensorflow", "torch")
    assert ASKED_BACKEND not in worker_environment({"KERAS_BACKEND": "tensorflow"})
