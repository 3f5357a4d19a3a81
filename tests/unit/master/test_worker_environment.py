# SPDX-License-Identifier: Apache-2.0
"""What the processes of workers are started with."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

from edl.contract import script_imports
from edl.contract.workers import (
    ASKED_BACKEND,
    MALLOC,
    WORKER_ENVIRONMENT,
    remove_leftovers,
    respect_backend,
    script_environment,
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
    assert worker_environment(given) == {**WORKER_ENVIRONMENT, ASKED_BACKEND: ""}


def test_another_backend_of_keras_is_overridden_and_remembered() -> None:
    found = worker_environment({"KERAS_BACKEND": "torch"})
    assert (found["KERAS_BACKEND"], found[ASKED_BACKEND]) == ("tensorflow", "torch")
    assert worker_environment(found)[ASKED_BACKEND] == "torch", "a second process adds the same"


@pytest.mark.parametrize("asked", ["jax", ""])
def test_the_script_of_a_user_has_the_backend_that_the_user_has_asked_for(asked: str) -> None:
    given = {"KERAS_BACKEND": asked} if asked else {}
    found = {**given, **worker_environment(given)}
    respect_backend(found)
    assert found.get("KERAS_BACKEND", "") == asked


def test_a_script_has_as_many_threads_as_the_values_say_unless_the_user_has_set_them() -> None:
    found = script_environment({"OMP_NUM_THREADS": "7"}, "import numpy\n", 2)
    assert "OMP_NUM_THREADS" not in found and found["OPENBLAS_NUM_THREADS"] == "2"
    assert found["TF_NUM_INTRAOP_THREADS"] == "2"
    assert set(script_environment({}, "import numpy\n", 0)) == {script_imports.VARIABLE}


@pytest.mark.parametrize(
    ("script", "modules"),
    [
        ('"""A loop."""\nimport os, numpy as np\nfrom torch import nn\nimport edl\n', ["numpy", "torch"]),
        ("import numpy\nnumpy.seterr()\nimport torch\n", ["numpy"]),
        ("import os\nos.environ['KERAS_BACKEND'] = 'jax'\nimport keras\n", []),
        ("import torch.nn.functional as F\nfrom . import mine\nimport jax\n", ["torch.nn.functional"]),
        ("import torch\nthis is no Python\n", []),
        ("no-such-file.py", []),
    ],
)
def test_only_imports_before_any_other_statement_are_made_for_a_script(
    script: str, modules: list[str]
) -> None:
    assert script_imports.leading_imports(script) == modules


def test_a_file_beside_a_script_is_imported_by_the_script_although_a_package_has_its_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "requests.py").touch()
    (script := tmp_path / "train.py").write_text("import numpy\nimport requests\nimport keras\n")
    assert script_imports.leading_imports(str(script)) == ["numpy"]


LEFTOVERS = [
    "TF_CONFIG",
    *(f"HOROVOD_{of}{name}" for of in ("", "LOCAL_", "CROSS_") for name in ("RANK", "SIZE")),
    *("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_ELASTIC", "HOROVOD_HOSTNAME"),
    *("HOROVOD_GLOO_IFACE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
]
CHOSEN = [
    *("HOROVOD_AUTOTUNE", "HOROVOD_CYCLE_TIME", "HOROVOD_TIMELINE", "HOROVOD_GLOO_TIMEOUT_SECONDS"),
    *("HOROVOD_LOG_LEVEL", "HOROVOD_IDLE_CYCLE_TIME", "HOROVOD_HIERARCHICAL_ALLREDUCE"),
    *("SLURM_JOB_ID", "OMPI_ALLOW_RUN_AS_ROOT", "HOME"),
]


def test_what_other_launchers_have_left_is_removed_and_named_and_what_a_user_chooses_stays() -> None:
    environment = dict.fromkeys([*LEFTOVERS, *CHOSEN], "1")
    (line,) = remove_leftovers(environment)
    assert sorted(environment) == sorted(CHOSEN)
    assert all(f" {name}" in line for name in LEFTOVERS)
    assert remove_leftovers(environment) == []


def test_of_two_settings_that_crash_horovod_together_one_is_removed() -> None:
    """SIGSEGV, with any values, and whether HOROVOD_AUTOTUNE is set or not."""
    environment = {"HOROVOD_FUSION_THRESHOLD": "1048576", "HOROVOD_CYCLE_TIME": "5"}
    (line,) = remove_leftovers(environment)
    assert environment == {"HOROVOD_FUSION_THRESHOLD": "1048576"}
    assert line.startswith("HOROVOD_CYCLE_TIME is not used")
    assert remove_leftovers({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_AUTOTUNE": "1"}) == []
