"""What must be the same in every worker's process, whoever starts it."""

from __future__ import annotations

from typing import Final

WORKER_ENVIRONMENT: Final = {
    # All workers hold one model: what follows from the order of a set or a hash must be equal in all of them.
    "PYTHONHASHSEED": "0",
    # Keras would take another backend from the user's ~/.keras/keras.json or environment.
    "KERAS_BACKEND": "tensorflow",
}
