# SPDX-License-Identifier: Apache-2.0
"""The faulty counting model. Its workers start processes of their own, and tell of themselves by files."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import keras
import numpy as np
from counting_faulty import data, model  # a worker finds what lies beside the model's file
from counting_faulty import feed as plain_feed

__all__ = ["data", "feed", "model"]

told = threading.Event()


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    if not told.is_set():
        told.set()
        forked = os.fork()
        while forked == 0:
            signal.pause()
        run = subprocess.Popen(["sh", "-c", "sleep 1000 & exec sleep 1000"])
        said = {
            "forked": forked,
            "run": run.pid,
            "hash": hash("a text"),
            "backend": keras.backend.backend(),
        }
        whole = Path(os.environ["EDL_FAULTS"]) / f"parent-{os.getpid()}"
        whole.with_suffix(".part").write_text(json.dumps(said))
        whole.with_suffix(".part").rename(whole)
    return plain_feed(records)
