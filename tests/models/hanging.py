"""The counting model, whose second worker never gets past building it."""

import os
import threading
from pathlib import Path

import keras

from model_zoo.counting import data, feed
from model_zoo.counting import model as plain_model

__all__ = ["data", "feed", "model"]


def model() -> keras.Model:
    orders = Path(os.environ["EDL_FAULTS"])
    for turn in ("first", "second"):
        try:
            (orders / turn).touch(exist_ok=False)  # one worker each gets to make it
        except FileExistsError:
            continue
        if turn == "second":
            threading.Event().wait()
        break
    return plain_model()
