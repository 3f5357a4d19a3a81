"""edl: elastic training of Keras models. What a user's model module needs is here.

import edl

def data(split):
    return x, y     # arrays, tables, a dataset that is indexed; or edl.csv(path, label="y"), or a Reader of
    your own
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
    """The readers and layers, on first use: the master imports edl too, and its image has no NumPy."""
    if name == "layers":
        return importlib.import_module("edl.layers")  # by its name: nothing else here may need TensorFlow
    if name not in __all__:
        raise AttributeError(f"module 'edl' has no attribute {name!r}")
    import edl.data

    return getattr(edl.data, name)
