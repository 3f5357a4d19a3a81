# SPDX-License-Identifier: Apache-2.0
"""A model that no worker ever gets past building."""

import threading

import keras
from counting_faulty import data, feed  # a worker finds what lies beside the model's file

__all__ = ["data", "feed", "model"]


def model() -> keras.Model:
    threading.Event().wait()
    raise AssertionError
