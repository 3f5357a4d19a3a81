# SPDX-License-Identifier: Apache-2.0
"""Keras layers of edl.

Only a user's model imports them, because they need TensorFlow.

    import edl.layers

    user = edl.layers.Embedding(16, name="user")(ids)
"""

from edl.layers.embedding import Embedding
from edl.layers.row_location import rows_to_be_loaded

__all__ = ["Embedding", "rows_to_be_loaded"]
