# SPDX-License-Identifier: Apache-2.0
"""The feature column of elasticdl_preprocessing."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.feature_column import feature_column_v2, serialization

from edl.errors import ModelError


class _Fields(NamedTuple):
    categorical_columns: tuple[Any, ...]


class ConcatenatedCategoricalColumn(feature_column_v2.CategoricalColumn, _Fields):
    """Categorical columns side by side. The ids of each follow those of the column before it.

    As in ElasticDL, the offset is added to the id -1 of an unknown text, too: in all columns but the first,
    it gets the last id of the column before.
    """

    _is_v2_column = True

    @property
    def name(self) -> str:
        return "_C_".join(sorted(column.name for column in self.categorical_columns))

    @property
    def num_buckets(self) -> int:
        return sum(column.num_buckets for column in self.categorical_columns)

    def transform_feature(self, transformation_cache: Any, state_manager: Any) -> Any:
        found = [
            column.get_sparse_tensors(transformation_cache, state_manager).id_tensor
            for column in self.categorical_columns
        ]
        sizes = (column.num_buckets for column in self.categorical_columns[:-1])
        offsets = itertools.accumulate(sizes, initial=0)
        moved = [
            ids.with_values(tf.cast(ids.values, tf.int64) + offset)
            for ids, offset in zip(found, offsets, strict=True)
        ]
        return tf.sparse.concat(axis=-1, sp_inputs=moved)

    def get_sparse_tensors(self, transformation_cache: Any, state_manager: Any) -> Any:
        ids = transformation_cache.get(self, state_manager)
        return feature_column_v2.CategoricalColumn.IdWeightPair(ids, None)

    @property
    def parents(self) -> list[Any]:
        return [*self.categorical_columns]

    @property
    def parse_example_spec(self) -> dict[str, Any]:
        return {k: v for column in self.categorical_columns for k, v in column.parse_example_spec.items()}

    def get_config(self) -> dict[str, Any]:
        return {
            "categorical_columns": [
                serialization.serialize_feature_column(c) for c in self.categorical_columns
            ]
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None, columns_by_name: Any = None
    ) -> ConcatenatedCategoricalColumn:
        return cls(
            tuple(
                serialization.deserialize_feature_column(column, custom_objects, columns_by_name)
                for column in config["categorical_columns"]
            )
        )


def concatenated_categorical_column(categorical_columns: list[Any]) -> ConcatenatedCategoricalColumn:
    """elasticdl_preprocessing.feature_column.feature_column.concatenated_categorical_column.

    Raises:
        ModelError: there are no columns, or one is not categorical.
    """
    for column in categorical_columns:
        if not isinstance(column, feature_column_v2.CategoricalColumn):
            raise ModelError(
                f"concatenated_categorical_column: {column!r} is a {type(column).__name__} (expected a "
                "categorical column of tf.feature_column)"
            )
    if not categorical_columns:
        raise ModelError("concatenated_categorical_column: the list of columns is empty")
    return ConcatenatedCategoricalColumn(tuple(categorical_columns))


COLUMNS = {ConcatenatedCategoricalColumn.__name__: ConcatenatedCategoricalColumn}  # beside TensorFlow's
