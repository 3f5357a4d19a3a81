# SPDX-License-Identifier: Apache-2.0
"""Keras is imported without two packages that it does not need, and user code still finds these."""

from __future__ import annotations

import subprocess
import sys

LOOK = """
import sys
from edl.trainer.runtime.keras_import import UNNEEDED, import_keras
import_keras()
print(sorted(name for name in UNNEEDED if name in sys.modules))
import keras, matplotlib.pyplot, sklearn.base
print(keras.Sequential.__name__, matplotlib.pyplot.figure.__name__, sklearn.base.BaseEstimator.__name__)
try:
    keras.visualization.plot_image_gallery([])
except ImportError as error:
    print(error)
"""


def test_user_code_finds_what_keras_did_not_import() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    hidden, found, refusal = done.stdout.splitlines()
    assert hidden == "[]"
    assert found == "Sequential figure BaseEstimator"
    assert "matplotlib" in refusal
