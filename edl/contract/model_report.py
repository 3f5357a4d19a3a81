# SPDX-License-Identifier: Apache-2.0
"""The report on a model file: `edl check` shows what edl.trainer.programs.check_model has found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class FoundMistake:
    """A mistake in a model file or in the values.

    Args:
        why: the mistake in one line.
        file, line, function: the user's line that it is about; an empty file if no line is known.
        cause: the error of a library that the mistake has led to; may be empty.
    """

    why: str
    file: str = ""
    line: int = 0
    function: str = ""
    cause: str = ""


@dataclass(frozen=True)
class FoundArray:
    """An array of a batch.

    Args:
        name: such as `features['age']`.
        dtype: the type of its values.
        shape: the shape of one record; None for lengths that differ.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class FoundSplit:
    """The records of a split.

    Args:
        source: where they come from, such as `data('train')`.
        arrays: the features, labels and weights of its first records.
        classes: the names of the labels' classes by number; empty if labels are numbers.
        columns: the names of the columns of a matrix of features; empty for other features.
    """

    name: str
    source: str
    records: int
    arrays: tuple[FoundArray, ...]
    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass
class ModelReport:
    """All that was found.

    Args:
        loss: the loss of the step; None if no step was made.
        metrics: results of the evaluation of a few records.
        parameters, trained: numbers of values in the model's variables.
        state_bytes: memory of the weights, the optimizer and what else a step changes.
        process_bytes: greatest memory of the process that has made the check.
        steps: steps of an epoch.
    """

    model: str
    mistakes: list[FoundMistake] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    splits: list[FoundSplit] = field(default_factory=list)
    outputs: list[FoundArray] = field(default_factory=list)
    optimizer: str = ""
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    parameters: int = 0
    trained: int = 0
    state_bytes: int = 0
    process_bytes: int = 0
    steps: int = 0
    seconds: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelReport:
        found: dict[str, Any] = json.loads(text)
        found["mistakes"] = [FoundMistake(**mistake) for mistake in found["mistakes"]]
        found["splits"] = [
            FoundSplit(
                **{
                    **split,
                    "arrays": tuple(map(_array, split["arrays"])),
                    "classes": tuple(split["classes"]),
                    "columns": tuple(split["columns"]),
                }
            )
            for split in found["splits"]
        ]
        found["outputs"] = list(map(_array, found["outputs"]))
        return cls(**found)


def _array(found: dict[str, Any]) -> FoundArray:
    return FoundArray(found["name"], found["dtype"], tuple(found["shape"]))
