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
    from edl.data import Reader, arrays, criteo, csv, dataset, from_tf, npz, parquet, split

    layers: Any

__version__ = "0.2.0"
__all__ = [
    "EdlError",
    "Reader",
    "arrays",
    "criteo",
    "csv",
    "dataset",
    "from_tf",
    "npz",
    "parquet",
    "split",
]


def __getattr__(name: str) -> Any:
    """Import readers and layers on first use: the master imports edl, too, and its image has no NumPy."""
    if name == "layers":
        return importlib.import_module("edl.layers")  # by its name: nothing else here may need TensorFlow
    if name not in __all__:
        raise AttributeError(f"module 'edl' has no attribute {name!r}")
    import edl.data

    return getattr(edl.data, name)
