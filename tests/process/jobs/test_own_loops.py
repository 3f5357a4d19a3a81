# SPDX-License-Identifier: Apache-2.0
"""The loops of examples/own_loops: each trains as its README says although a worker is killed, and learns.

TensorFlow is installed here, and none of them needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edl.journal import audit

EXAMPLES = Path(__file__).parents[3] / "examples" / "own_loops"
NEEDED = {"pytorch_loop": ["torch"], "jax_loop": ["jax", "optax"], "keras_loop": ["jax", "keras"]}
A_Job = Callable[..., Any]


@pytest.mark.parametrize("name", NEEDED)
async def test_an_own_loop_learns_although_a_worker_is_killed(
    name: str, a_job: A_Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in NEEDED[name]:
        pytest.importorskip(module)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    said = (EXAMPLES / "README.md").read_text()
    assert f"--script examples/own_loops/{name}.py" in said
    sets = [f"model.script={EXAMPLES / f'{name}.py'}", "training.batchSize=64", "minWorkers=2"]
    async with a_job(*sets, workers=2, epochs=20, own_fork_server=True) as job:
        members = await job.ring_of(2)
        loaded = "".join(Path(f"/proc/{job.pid(member)}/maps").read_text() for member in members)
        assert "host_buffers" in loaded and "libtensorflow" not in loaded
        job.kill(members[-1])
        summary = await job.end()
        log = "".join(path.read_text(errors="replace") for path in (job.output / "logs").glob("worker-*"))
    assert summary["phase"] == "Succeeded", summary
    assert "exactly once" in audit.audit(job.output)
    (accuracy,) = re.findall(r"accuracy (\d\.\d+)", log)
    assert float(accuracy) > 0.9
