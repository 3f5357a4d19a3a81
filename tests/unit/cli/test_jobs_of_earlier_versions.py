# SPDX-License-Identifier: Apache-2.0
"""Output directories that an earlier version of edl has written: values have come since."""

from __future__ import annotations

import json
from pathlib import Path

from edl.cli.jobs.export import _of_job
from edl.cli.local.job import Local
from edl.config import values
from edl.contract import artifacts


def test_a_job_without_a_value_that_is_new_is_exported_and_shown(tmp_path: Path) -> None:
    of_then = values.load(sets=["model.module=mnist,checkpoint.dir=checkpoints"])
    del of_then["report"]
    (tmp_path / "values.json").write_text(json.dumps(of_then))
    (tmp_path / artifacts.SUMMARY).write_text("{}")
    (tmp_path / artifacts.MODEL).touch()
    assert _of_job(tmp_path, None)["trained"] == str(tmp_path / artifacts.MODEL)
    assert Local(tmp_path)._given() == "mnist"
