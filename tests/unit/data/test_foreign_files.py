# SPDX-License-Identifier: Apache-2.0
"""Files that other projects made and ship with their packages, read here and by a second decoder."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import polars
import pytest
import tensorflow as tf

import edl
from edl.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:Reading .*created on Python 2:UserWarning")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_CACHE", str(tmp_path))
    monkeypatch.setattr("edl.data.files.index_file.BESIDE", 1 << 60)


def files(package: str, pattern: str) -> list[Path]:
    """The files of an installed package that match, at least one."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations
    paths = sorted(Path(found.submodule_search_locations[0]).rglob(pattern))
    assert paths, f"{package} has no {pattern} any more"
    return paths


def compared(reader: Any, expected: Mapping[str, Any]) -> None:
    """Compare all records with what a second decoder has read."""
    records = reader.read(0, len(reader))
    columns = records if isinstance(records, dict) else {"": records}
    assert set(columns) == set(expected)
    for name, values in columns.items():
        theirs = np.asarray(expected[name])
        assert values.shape == theirs.shape
        assert values.dtype.kind == "O" or values.dtype.newbyteorder("=") == theirs.dtype.newbyteorder("=")
        np.testing.assert_array_equal(values, theirs)


def exact_or_refused(
    open_it: Callable[..., Any], path: Path, names: list[str], expected: Callable[[], Mapping[str, Any]]
) -> bool:
    """Whether the file was read; if not, it was refused by name."""
    try:
        reader = open_it(path, names) if names else open_it(path)
    except DataError:
        return False
    compared(reader, expected())
    return True


def one_array(path: Path) -> dict[str, np.ndarray]:
    return {"": np.load(path)}


def test_arrays_of_numpy_and_scipy() -> None:
    """Written by Python 2 and 3, on Windows, in Fortran order, of objects, of records, of long doubles."""
    read = 0
    for path in [*files("numpy", "*.npy"), *files("scipy", "*.npy"), *files("matplotlib", "*.npy")]:
        read += exact_or_refused(edl.npy, path, [], partial(one_array, path))
    assert read > 3


def test_hdf5_files_of_h5py() -> None:
    """Text of a variable length, one file from a big-endian machine."""
    read = 0
    for path in files("h5py", "*.h5"):
        with h5py.File(path) as content:
            for name in [name for name in content if content[name].shape]:
                values = content[name]
                expected = values.asstr()[()] if h5py.check_string_dtype(values.dtype) else values[()]
                read += exact_or_refused(edl.hdf5, path, [name], partial(dict, {name: expected}))
    assert read


def test_parquet_files_of_earlier_versions_of_pandas() -> None:
    """With an index of one or several levels, times and time zones; Polars reads them without Arrow."""
    read = 0
    for path in files("pyarrow", "*.parquet"):
        frame = polars.read_parquet(path)
        for name in frame.columns:
            column = frame[name]
            if isinstance(column.dtype, polars.Datetime) and column.dtype.time_zone:
                column = column.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
            expected = {name: column.to_numpy()}
            read += exact_or_refused(edl.parquet, path, [name], partial(dict, expected))
        assert not [name for name in edl.parquet(path).read(0, 1) if name.startswith("__index_level")]
    assert read > 30


def test_tables_of_scikit_learn_matplotlib_and_numpy() -> None:
    """With two header lines, comments, hexadecimal numbers, columns of one name; compressed."""
    refused = {}
    paths = [*files("sklearn", "*.csv"), *files("sklearn", "*.csv.gz"), *files("matplotlib", "*.csv")]
    for path in [*paths, *files("numpy", "umath*.csv"), *files("numpy", "*testset*.csv")]:
        try:
            reader = edl.csv(path)
        except DataError as error:
            refused[path.name] = str(error)
            continue
        frame = polars.read_csv(path, infer_schema_length=None, try_parse_dates=True)
        compared(reader, {name: frame[name].to_numpy() for name in frame.columns})
    assert "a hexadecimal number" in refused["sfc64-testset-1.csv"]
    assert "0x" in refused["umath-validation-set-log2.csv"]
    assert "30 columns have the name" in refused["digits.csv.gz"]
    assert "Expected 4 columns, got 31" in refused["breast_cancer.csv"]
    assert "data_x_x2_x3.csv" not in refused


def test_images_of_matplotlib_and_scikit_learn() -> None:
    """JPEG, and PNG with and without transparency; TensorFlow decodes them too."""
    paths = [*files("matplotlib", "*.png"), *files("scipy", "*.png")]
    for path in [*paths, *files("matplotlib", "*.jpg"), *files("sklearn", "*.jpg")]:
        data, found = tf.io.read_file(str(path)), edl.images([path]).read(0, 1)[0]
        if path.suffix == ".jpg":
            expected = tf.io.decode_jpeg(data, channels=3, dct_method="INTEGER_ACCURATE")
        else:
            expected = tf.io.decode_png(data, channels=3)
            assert np.array_equal(
                edl.images([path], channels=4).read(0, 1)[0], tf.io.decode_png(data, channels=4)
            )
        assert np.array_equal(found, expected), path


def test_records_of_grain() -> None:
    (path,) = files("grain", "*.tfrecord")
    expected = [record.numpy() for record in tf.data.TFRecordDataset(str(path))]
    assert edl.tfrecord(path, raw=True).read(0, len(expected)).tolist() == expected
