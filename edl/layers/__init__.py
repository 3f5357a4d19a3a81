"""Layers of Keras that are edl's own. Only a user's model imports them: they need TensorFlow, as nothing else
in `edl` does.

    import edl.layers

    user = edl.layers.Embedding(16, name="user")(ids)
"""

from edl.layers.embedding import Embedding, rows_to_be_loaded

__all__ = ["Embedding", "rows_to_be_loaded"]
