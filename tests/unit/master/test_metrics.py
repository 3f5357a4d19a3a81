# SPDX-License-Identifier: Apache-2.0
"""The metrics about the training: loss, evaluations and speeds. `edl.master.http.metrics`."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from edl.contract.ids import WorkerId
from edl.master.core import events as ev
from edl.master.core import facts, view
from edl.master.http.metrics import Metrics
from tests.support.jobs.stories import Story


def values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """The samples about the training, by name and by the values of their labels (sorted by label)."""
    found: dict[tuple[str, ...], float] = {}
    for metric in text_string_to_metric_families(metrics.page()[1].decode()):
        if metric.name in (
            "edl_loss",
            "edl_training_metric",
            "edl_evaluation",
            "edl_worker_records_per_second",
        ):
            found |= {
                (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
                for sample in metric.samples
            }
    return found


def test_loss_metrics_and_speeds_have_values_once_they_are_known() -> None:
    story = Story(workers=3)
    beats: dict[WorkerId, facts.Heartbeat] = {}
    metrics = Metrics(lambda: view.status(story.job, story.now, beats))
    assert values(metrics) == {}
    story.running()
    generation, root = story.job.ring.generation, story.job.ring.members[0]
    story.tell(
        ev.EpochEnded(root, generation, 1, facts.EpochLoss(0, 100, 0.5), {"accuracy": 0.75, "auc": None})
    )
    story.tell(ev.Evaluated(root, generation, 10, "test", 50, {"loss": 0.25, "auc": None}))
    found = values(metrics)
    assert found["edl_loss", "epoch"] == 0.5 and ("edl_loss", "step") not in found
    assert found["edl_training_metric", "accuracy"] == 0.75
    assert found["edl_evaluation", "loss", "test"] == 0.25
    assert not [key for key in found if "auc" in key], "a value that is not finite is left out"
    speeds = [found["edl_worker_records_per_second", of] for of in ("slowest", "median", "fastest")]
    assert speeds == [0.0, 0.0, 0.0]
