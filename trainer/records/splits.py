# SPDX-License-Identifier: Apache-2.0
"""The sources of a job's splits: data(split), data() for all records, or addresses in the values.

A split that a value names (data.train, data.validation, ...) comes from that address, and not from the
module's data(). With data.train, data() is never called. Records that are not divided yet (those of data()
without a split, or of data.train without other addresses) are divided by data.validationFraction, with
training.seed: so each worker, and each job with this seed, draws the same ones.

Where only "test" has records, they are those of "validation": this split had that name before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from edl.config.job import Data
from edl.contract.evaluation import FINAL, VALIDATION
from edl.data import Reader, dataset, open_files, split
from edl.data.same import same_records
from edl.errors import DataError, ModelError


class Splits:
    """A function data(split) over these sources.

    Args:
        name: the module's name, for messages.
        function: the module's data(); None if it has none.
        values: the values in `data`; None to ignore them.
        seed: seed of the division.
        open_raw: opens an address for ElasticDL's feed(), given data.format and data.options; None for the
            formats of edl.

    Raises:
        ModelError: data() can be called neither as data(split) nor as data().
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any] | None,
        values: Data | None,
        seed: int,
        open_raw: Callable[[str, str, dict[str, Any]], Reader] | None = None,
    ):
        self._open_raw = open_raw
        self._name, self.function, self._values, self._seed = name, function, values, seed
        self._addresses = values.addresses if values is not None else {}
        self._fraction = values.validation_fraction if values is not None else 0.0
        self._takes_split = function is None or takes_split(function, name)
        self._divided: dict[str, Reader] | None = None
        self._only_test = False  # known once the records for the validation were asked for

    @property
    def divides(self) -> bool:
        """Whether the records for the evaluation are drawn from those of data() or of data.train."""
        undivided = "train" in self._addresses or not self._takes_split
        return undivided and not self._addresses.keys() & {VALIDATION, FINAL}

    def advice(self) -> str:
        """What to rename if only "test" has records; empty if not, or as long as this is not known."""
        if not self._only_test:
            return ""
        old, new = (
            ("data.test", "data.validation") if FINAL in self._addresses else ('"test"', '"validation"')
        )
        return (
            f'{self.source(FINAL)} is used as validation data: rename {old} to {new}; the split "test" is '
            "for records that only the trained model is evaluated on (docs/evaluation.md)"
        )

    def name_of(self, split_name: str) -> str:
        """The name by which the source knows a split."""
        return FINAL if split_name == VALIDATION and self._only_test else split_name

    def source(self, split_name: str) -> str:
        """The source of a split, for people: `data.train=houses.csv`, `data('test')` or `data()`."""
        split_name = self.name_of(split_name)
        if split_name in self._addresses:
            return f"data.{split_name}={self._addresses[split_name]}"
        if split_name == VALIDATION and self.divides:
            return f"data.validationFraction={self._fraction:g} of {self.source('train')}"
        return f"data({split_name!r})" if self._takes_split else "data()"

    def __call__(self, split_name: str) -> Any:
        """Return what the source of a split gives; None if the split has no records.

        Raises:
            DataError: a file cannot be read, or too few records are left for a split.
            FileNotFoundError: data() opens a file that does not exist.
        """
        if split_name == FINAL and self._only_test:
            return None
        if split_name in ("train", VALIDATION) and self.divides:
            return self._division().get(split_name)
        if split_name != VALIDATION:
            return self._of(split_name)
        missing: Exception | None = None
        try:
            found = self._of(VALIDATION)
        except (FileNotFoundError, DataError) as error:  # data() opens a file with the name of the split
            if not isinstance(error.__cause__ or error, FileNotFoundError):
                raise
            found, missing = None, error
        if found is None:
            found = self._of(FINAL)
            self._only_test = found is not None
        if found is None and missing is not None:
            raise missing
        return found

    def _of(self, split_name: str) -> Any:
        """Return what is known by this name; None if there are no such records.

        Raises:
            DataError: a file cannot be read.
            KeyError: raised by data(), other than for the name of a split.
        """
        if split_name in self._addresses:
            return self._open(split_name)
        if "train" in self._addresses or self.function is None:
            return None
        if self._takes_split:
            try:
                return self.function(split_name)
            except KeyError as error:  # of a dictionary with the splits
                if error.args == (split_name,) and split_name in (VALIDATION, FINAL):
                    return None
                raise
        return self.function() if split_name == "predict" else None

    def _open(self, split_name: str) -> Reader:
        assert self._values is not None
        how = self._values
        if self._open_raw is not None:
            return self._open_raw(self._addresses[split_name], how.format, how.options)
        roles = {"features": _columns(how.features), "label": how.label, "weight": how.weight}
        given = {key: value for key, value in roles.items() if value}
        return open_files(self._addresses[split_name], how.format or None, **given, **how.options)

    def _division(self) -> dict[str, Reader]:
        """Return readers of the training's records and of those that are held out, which share the records.

        Raises:
            DataError: a file cannot be read, or too few records are left for a split.
        """
        if self._divided is None:
            where = self.source("train")
            if "train" in self._addresses:
                records = self._open("train")
            else:
                assert self.function is not None
                records = dataset(self.function(), source=where)
            count = len(records)
            if not count or not self._fraction:
                self._divided = {"train": records}
                return self._divided
            try:
                self._divided = split(records, validation=self._fraction, seed=self._seed)
            except DataError as error:
                raise DataError(
                    f"{self._name}: {where} has {count:,} records, too few to hold out a share of "
                    f"{self._fraction:g} (data.validationFraction): {error}; 0 holds out none"
                ) from error
        return self._divided


def _columns(names: list[str]) -> Any:
    """One column as it is, several as a list."""
    return names[0] if len(names) == 1 else names


def takes_split(function: Callable[..., Any], name: str) -> bool:
    """Whether data() is called as data(split).

    edl/config/model_check.py checks the same without importing the module.

    Raises:
        ModelError: data() can be called neither as data(split) nor as data().
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return True
    try:
        signature.bind("train")
        return True
    except TypeError as error:
        why = error
    try:
        signature.bind()
        return False
    except TypeError:
        raise ModelError(f"{name}: data{signature} is called as data(split) or data(): {why}") from why


def are_same(one: Reader, other: Reader) -> bool:
    """Whether two readers hold the same records, as `same_records` says; False if that cannot be read."""
    try:
        return same_records(one, other)
    except Exception:  # a bad record: the evaluation, or the step that has it, reports it
        return False


def memorized(train: Reader, held_out: Reader, source: str) -> str:
    """A warning if the model would be evaluated on the records that it trains on; empty if not.

    Args:
        source: where the held-out records come from.
    """
    if not are_same(train, held_out):
        return ""
    return (
        f"the records of {source} are those of the training: their evaluation tells how well the model "
        "remembers them, and nothing about new records. Hold some out: edl.split, data() without a split, or "
        "data.validationFraction (docs/data.md#records-that-are-held-out)"
    )


def refuse_empty(size: int, split: str, name: str, allowed: bool) -> None:
    """Refuse data without records, unless the job allows it.

    Raises:
        DataError: there are no records, and that is not allowed.
    """
    if size == 0 and not allowed:
        none = "; return None if nothing is held out" if split in (VALIDATION, FINAL) else ""
        raise DataError(
            f"{name}: data({split!r}) has no records{none} (expected at least 1, or data.allowEmpty=true)"
        )
