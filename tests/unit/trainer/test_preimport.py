# SPDX-License-Identifier: Apache-2.0
"""What a process imports that forks the workers of a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edl.contract.script_imports import VARIABLE

FORKS = """
import sys
from edl.trainer.start.preimport import import_all
import_all()
print(sorted({"harmless", "threaded", "local", "tensorflow", "aiohttp"} & set(sys.modules)))
"""
HARMLESS = "import os\nBACKEND = os.environ.get('KERAS_BACKEND')\nassert BACKEND == 'jax'\n"
THREADED = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


@pytest.mark.parametrize(
    ("names", "imported"),
    [
        ("harmless,local,threaded", "['harmless']"),  # a file beside the script ends the list
        ("harmless,threaded", "[]"),
        ("", "[]"),
    ],
)
def test_it_imports_installed_packages_that_may_be_forked_and_no_others(
    names: str, imported: str, tmp_path: Path
) -> None:
    installed, beside = tmp_path / "site-packages", tmp_path / "beside"
    for path, text in [
        (installed / "harmless.py", HARMLESS),
        (installed / "threaded.py", THREADED),
        (beside / "local.py", ""),
    ]:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{installed}{os.pathsep}{beside}",
        "KERAS_BACKEND": "tensorflow",
        "EDL_ASKED_KERAS_BACKEND": "jax",
        VARIABLE: names,
    }
    found = subprocess.run(
        [sys.executable, "-c", FORKS], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == imported
