"""edl: elastic training of Keras models. What a user's model module needs is here.

import edl

def data(split):
    return edl.arrays(x, y)     # or edl.npz(path), edl.csv(path), or a Reader of your own
"""

from edl.errors import EdlError
from edl.readers import Reader, arrays, csv, npz

__version__ = "0.1.0"
__all__ = ["EdlError", "Reader", "arrays", "csv", "npz"]
