# SPDX-License-Identifier: Apache-2.0
"""A job is refused where a Horovod without edl's patches is installed, or where its framework is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.cli.start import local_job
from edl.cli.start.local_job import run_job
from edl.errors import EdlError


def test_a_job_beside_stock_horovod_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed := tmp_path / "site" / "horovod-0.28.1.dist-info").mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(EdlError, match=r"horovod 0\.28\.1 is installed, .*pip uninstall horovod edl-horovod"):
        run_job(tmp_path / "job", {})
    assert not (tmp_path / "job").exists()


def test_a_keras_model_without_tensorflow_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_job, "find_spec", lambda name: None)
    with pytest.raises(EdlError, match=r"needs TensorFlow, .*: pip install 'edl-trainer\[worker\]'"):
        run_job(tmp_path / "job", {})
