# SPDX-License-Identifier: Apache-2.0
"""GPUs of this machine: which of them the workers of `edl run` may use, and which one each worker gets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edl.cli.app import app
from edl.contract.gpus import too_few_gpus, use_gpu, visible_gpus, workers_per_gpu
from edl.contract.ids import WorkerId
from edl.errors import ConfigError
from edl.master.backends.gpus import Gpus


def devices(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


def test_all_gpus_of_a_machine_are_found_by_their_device_files(tmp_path: Path) -> None:
    here = devices(tmp_path, "nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null")
    assert visible_gpus({}, here) == ["0", "1", "2"], "CUDA numbers them without gaps"
    assert visible_gpus({}, tmp_path / "none") == []


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("3", ["3"]),
        (" 2, 0", ["2", "0"]),
        ("GPU-8f,MIG-1a", ["GPU-8f", "MIG-1a"]),
        ("1,1", ["1"]),
        ("0,-1,2", ["0"]),  # CUDA ignores what follows an invalid entry
        ("-1", []),
        ("", []),
    ],
)
def test_only_gpus_in_the_users_variable_are_dealt_out(said: str, found: list[str], tmp_path: Path) -> None:
    here = devices(tmp_path, "nvidia0", "nvidia1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": said}, here) == found


def test_a_share_of_a_gpu_says_how_many_workers_use_it() -> None:
    shares = {"auto": None, 0: 0, 1: 1, 0.5: 2, 0.34: 2, 0.1: 10, 0.01: 100}
    assert {share: workers_per_gpu(share) for share in shares} == shares  # type: ignore[arg-type]


def test_a_machine_with_too_few_gpus_is_refused_by_name_and_number() -> None:
    two = {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert not too_few_gpus(1, 2, two) and not too_few_gpus(0.5, 4, two)
    assert too_few_gpus(1.0, 3, two) == (
        "local.gpusPerWorker is 1, and CUDA_VISIBLE_DEVICES=4,5 has 2 GPUs, enough for 2 workers, "
        "not for workers=3"
    )
    none = {"CUDA_VISIBLE_DEVICES": ""}
    assert "CUDA_VISIBLE_DEVICES= has no GPU: set local.gpusPerWorker=0" in too_few_gpus(0.5, 0, none)
    assert not too_few_gpus("auto", 9, none) and not too_few_gpus(0, 9, none)


def test_a_worker_sees_its_gpu_alone_and_the_users_host_id_stays() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "4,5"}
    use_gpu(environment, "", "")
    assert environment == {"CUDA_VISIBLE_DEVICES": "4,5"}
    use_gpu(environment, "5", "edl-1")
    assert environment == {"CUDA_VISIBLE_DEVICES": "5", "NCCL_HOSTID": "edl-1"}
    use_gpu(environment, "4", "edl-0")
    assert environment == {"CUDA_VISIBLE_DEVICES": "4", "NCCL_HOSTID": "edl-1"}


def given(gpus: Gpus, worker: int) -> list[str] | None:
    return gpus.assign(WorkerId(worker))


def at(device: str, place: int) -> list[str]:
    return ["--gpu", device, "--nccl-host", f"edl-{place}"]


def test_each_worker_has_a_gpu_of_its_own_and_its_successor_takes_it_over() -> None:
    gpus = Gpus(["GPU-a", "GPU-b"], each=1)
    assert [given(gpus, w) for w in range(3)] == [at("GPU-a", 0), at("GPU-b", 0), None]
    gpus.leaves(WorkerId(0))
    assert given(gpus, 2) is None, "its process may still hold the GPU's memory"
    gpus.release(WorkerId(0))
    assert given(gpus, 2) == at("GPU-a", 0)


def test_workers_that_share_a_gpu_are_different_hosts_to_nccl() -> None:
    gpus = Gpus(["0", "1"], each=2)
    assert [given(gpus, w) for w in range(5)] == [at("0", 0), at("1", 0), at("0", 1), at("1", 1), None]
    gpus.release(WorkerId(3))
    gpus.release(WorkerId(1))
    assert [given(gpus, w) for w in (5, 6)] == [at("1", 0), at("1", 1)]


def test_workers_are_spread_over_all_gpus_without_a_limit() -> None:
    gpus = Gpus(["0", "1"])
    assert [given(gpus, w) for w in range(4)] == [at("0", 0), at("1", 0), at("0", 1), at("1", 1)]
    gpus.leaves(WorkerId(3))
    assert given(gpus, 4) == at("1", 2), "beside the worker that ends there, and is still in its place"
    assert given(gpus, 5) == at("0", 2)


def test_a_machine_without_gpus_changes_nothing_and_a_share_of_0_hides_them() -> None:
    assert given(Gpus(), 0) == []
    assert given(Gpus(["0"], each=0), 0) == ["--gpu", "-1"]


def test_edl_run_refuses_more_workers_than_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    script = tmp_path / "train.py"
    script.write_text("import horovod.tensorflow as hvd\nhvd.init()\n")
    share = "--set=local.gpusPerWorker=0.5"
    for line in (["run", "digits", share, "--workers=3"], ["horovod", share, "-np", "3", str(script)]):
        done = CliRunner().invoke(app, line)
        assert isinstance(done.exception, ConfigError)
        assert "has 1 GPU, enough for 2 workers, not for workers=3" in str(done.exception)


async def test_all_that_wait_are_woken_when_a_gpu_is_free() -> None:
    gpus = Gpus(["0"], each=1)
    assert given(gpus, 0)
    waiting = [asyncio.create_task(gpus.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    gpus.release(WorkerId(0))
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
