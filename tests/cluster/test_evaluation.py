# SPDX-License-Identifier: Apache-2.0
"""A release trains, then evaluates, then predicts, as docs/evaluation.md and docs/export.md show it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.contract import artifacts
from edl.contract.reasons import Reason
from tests.cluster.cluster import ROOT, Images, Namespace
from tests.cluster.release import Release
from tests.cluster.test_commands import edl

pytestmark = pytest.mark.timeout(600)


def test_four_workers_train_evaluate_and_predict_and_nothing_is_left_but_what_they_wrote(
    namespace: Namespace, images: Images, claim: Callable[..., None], tmp_path: Path
) -> None:
    """One release, as docs/evaluation.md and docs/export.md show it: a training, and two upgrades of it."""
    namespace.restrict()
    kept = tmp_path / "kept"
    kept.mkdir()
    kept.chmod(0o777)
    claim("kept", kept, "ReadWriteMany")
    model = {"model.source": str(ROOT / "tests" / "models" / "waiting.py"), "output.existingClaim": "kept"}
    job = Release(namespace, {**images.values, **model})
    job.install("--wait", workers=4, evaluation__epochs=5, evaluation__steps=300)
    namespace.kubectl(
        "wait",
        "--for=jsonpath={.data.phase}=Succeeded",
        "configmap/edl-status",
        "--timeout=240s",
        seconds=270,
    )
    summary = job.summary()
    assert summary["metrics"]["accuracy"] >= 0.97
    assert (summary["records"]["applied"], summary["step"]) == (20 * 1438, 20 * 45)
    told = namespace.kubectl("logs", "deployment/edl-master")
    steps = [int(step) for step in re.findall(r"Evaluation at step (\d+) on 359 records of data", told)]
    assert steps == [225, 300, 450, 600, 675], "after each five epochs, and after each 300 steps"
    assert "Evaluation on the held-out records: " in told, "at the end"
    job.told(reason=Reason.Succeeded)
    fetched = tmp_path / "mine.keras"
    edl(job, "model", "get", fetched)
    assert fetched.read_bytes() == (kept / artifacts.MODEL).read_bytes()
    verdict = edl(job, "audit")
    assert verdict.startswith("exactly once: 1,438 records x 20 epochs in 900 steps"), verdict
    assert "1 exported file as written (SHA-256)" in verdict

    trained: dict[str, Any] = {"initFrom__path": f"/var/lib/edl/{artifacts.MODEL}", "workers": 2}
    job.upgrade(runId="evaluate", mode="evaluate", **trained)
    evaluated = another(job, "evaluate")
    assert evaluated["metrics"] == pytest.approx(summary["metrics"], rel=1e-6, abs=1e-6)

    parts = kept / artifacts.PREDICTIONS
    # A ring of the first worker alone would begin the second round, and wait there for the test.
    job.upgrade(runId="predict", mode="predict", prediction__partRecords=5, minWorkers=2, **trained)
    job.until(lambda data: (json.loads(data.get("status.json", "{}")).get("pass") or {}).get("done") == 80)
    assert len(list(parts.glob("part-*"))) == 16, "a round; no part of the next one is written yet"
    namespace.kubectl("delete", "pod", job.workers()[0], "--grace-period=0", "--force")
    (kept / "go").touch()
    assert another(job, "predict")["workers_created"] >= 3
    files = sorted(parts.glob("part-*.npz"))
    assert np.concatenate([np.load(file)["ids"] for file in files]).tolist() == list(range(359))
    assert all(np.isfinite(np.load(file)["output"]).all() for file in files)
    assert json.loads((parts / "predictions.json").read_text())["complete"] is True

    namespace.helm("uninstall", "edl", "--wait")
    namespace.until("pods", lambda pods: not pods, seconds=60)
    for kind in ("configmaps", "secrets", "services", "deployments", "leases"):
        left = namespace.get(kind, "-l", "app.kubernetes.io/instance=edl")
        assert left == [], f"{kind} are left"


def another(job: Release, kind: str) -> dict[str, Any]:
    """The summary of the run of this kind that an upgrade has begun, once it has succeeded."""

    def ended(data: dict[str, str]) -> bool:
        found = json.loads(data.get("summary.json", "{}"))
        return data.get("phase") in ("Failed", "Stopped") or found.get("task", {}).get("kind") == kind

    data = job.until(ended)
    assert data["phase"] == "Succeeded", data
    return job.summary()
