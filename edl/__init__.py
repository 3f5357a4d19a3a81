# SPDX-License-Identifier: Apache-2.0
"""edl: elastic training of Keras models.

A user's model module imports it and defines its data, for example:

    import edl

    def data(split):
        return x, y     # arrays, tables, an indexed dataset; or edl.csv(path, label="y"), or your own Reader
"""

import importlib
from typing import TYPE_CHECKING, Any

from edl.errors import EdlError

if TYPE_CHECKING:
    from edl.data import (
        Reader,
        arrayrecord,
        arrays,
        csv,
        dataset,
        from_tf,
        hdf5,
        images,
        npy,
        open_files,
        parquet,
        split,
        text,
        tfrecord,
    )

    layers: Any
    fit: Any  # edl.compat.notebook.fit
    join: Any  # edl.trainer.join
    state: Any
    State: Any
    recordio: Any  # edl.compat.elasticdl.recordio

__version__ = "0.2.0"
__all__ = [
    "EdlError",
    "Reader",
    "State",
    "arrayrecord",
    "arrays",
    "csv",
    "dataset",
    "fit",
    "from_tf",
    "hdf5",
    "images",
    "join",
    "npy",
    "open_files",
    "parquet",
    "recordio",
    "split",
    "state",
    "text",
    "tfrecord",
]


def __getattr__(name: str) -> Any:
    """Import readers and layers on first use: the master imports edl, too, and its image has no NumPy.

    Raises:
        AttributeError: the package has no such name.
    """
    if name == "layers":
        return importlib.import_module("edl.layers")  # by its name: nothing else here may need TensorFlow
    if name == "State":
        return importlib.import_module("edl.trainer.model.loop_state").State
    if name in ("join", "state"):  # for a training loop of one's own
        return getattr(importlib.import_module("edl.trainer.join"), name)
    if name in ("fit", "recordio"):
        from edl import integrations

        return integrations.load(integrations.FUNCTIONS[name], f"edl.{name}()")
    if name in ("criteo", "idx", "npz"):
        from edl.data.formats.opening import recipe

        raise AttributeError(recipe(name))
    if name not in __all__:
        raise AttributeError(f"module 'edl' has no attribute {name!r}")
    import edl.data

    return getattr(edl.data, name)
