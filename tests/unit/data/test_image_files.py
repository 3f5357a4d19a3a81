# SPDX-License-Identifier: Apache-2.0
"""Folders and tables of images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas
import pytest
import tensorflow as tf
from PIL import ExifTags, Image

import edl
from edl.data.formats import image_files
from edl.data.formats.image_files import classes_of, number_as
from edl.errors import DataError
from edl.trainer.model.user_model import UserModel


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("edl.data.files.index_file.BESIDE", 0)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Images of two classes, of different sizes and formats."""
    chance = np.random.default_rng(3)
    root = tmp_path / "pictures"
    for name, form in (("cat", "png"), ("dog", "jpg"), ("cat", "webp"), ("dog", "bmp")):
        (root / name).mkdir(parents=True, exist_ok=True)
        pixels = chance.integers(0, 256, (30, 40, 3), np.uint8)
        Image.fromarray(pixels).save(root / name / f"{form}.{form}")
    (root / "cat" / "notes.md").write_text("no image")
    return root


def test_a_folder_for_each_class(pictures: Path) -> None:
    reader: Any = edl.images(pictures)
    x, y = reader.read(0, 4)
    assert (x.shape, x.dtype, y.tolist()) == ((4, 30, 40, 3), np.uint8, [0, 0, 1, 1])
    for nth, name in enumerate(["cat/png.png", "cat/webp.webp", "dog/bmp.bmp", "dog/jpg.jpg"]):
        assert np.array_equal(x[nth], np.asarray(Image.open(pictures / name).convert("RGB")))
    again, labels = reader.take(np.array([3, 0]))
    assert np.array_equal(again, x[[3, 0]])
    assert labels.tolist() == [1, 0]
    grey, numbers = edl.images(pictures, size=(8, 6), channels=1, classes=["dog", "cat"]).read(0, 4)
    assert (grey.shape, numbers.tolist()) == ((4, 8, 6, 1), [1, 1, 0, 0])
    assert edl.images(pictures / "cat").read(0, 2).shape == (2, 30, 40, 3)


def test_classes_are_those_of_the_training_in_every_split(tmp_path: Path) -> None:
    def folders(split: str, **counts: int) -> Path:
        for name, count in counts.items():
            (tmp_path / split / name).mkdir(parents=True)
            for nth in range(count):
                Image.fromarray(np.full((2, 2, 3), nth, np.uint8)).save(
                    tmp_path / split / name / f"{nth}.png"
                )
        return tmp_path / split

    train, test = folders("train", cat=2, dog=0, owl=1, _hidden=1), folders("test", cat=1, owl=1)
    reader: Any = edl.images(train)
    assert reader.classes == ("cat", "dog", "owl") and reader.read(0, 3)[1].tolist() == [0, 0, 2]
    assert edl.images(test).read(0, 2)[1].tolist() == [0, 1], "by itself, a folder knows of no other classes"

    def module(**options: Any) -> UserModel:
        return UserModel("mine", lambda: None, lambda split: edl.images(tmp_path / split, **options), None)

    for splits in (("train", "test"), ("test",)):  # in a job, and in a process that reads the one split
        module_of_job = module()
        readers = [module_of_job.reader(split) for split in splits]
        assert readers[-1] is not None and readers[-1].read(0, 2)[1].tolist() == [0, 2]
        assert module_of_job.labels.classes == ("cat", "dog", "owl")
    divided: Any = edl.split(edl.images(test), validation=0.5)["validation"]
    number_as(divided, ["owl", "cat"], "test")
    assert classes_of(divided) == ("owl", "cat")
    folders("test", fox=1)
    with pytest.raises(
        DataError, match=r"fox/0\.png: class 'fox' of data\('test'\) is not one of the training's"
    ):
        module().reader("test")
    with pytest.raises(DataError, match="data\\('test'\\): classes is cat, fox, owl, and the model's labels"):
        number_as(edl.images(test, classes=["cat", "fox", "owl"]), reader.classes, "data('test')")
    folders("predict", anything=1)
    assert module().reader("predict") is not None, "labels of a prediction are not used"


def test_a_table_of_paths(pictures: Path) -> None:
    table = pandas.DataFrame({"file": ["dog/bmp.bmp", "cat/png.png"], "kind": ["dog", "cat"], "age": [3, 4]})
    table.to_csv(pictures / "table.csv", index=False)
    x, y = edl.images(pictures / "table.csv", paths="file", label="kind").read(0, 2)
    assert np.array_equal(x[0], np.asarray(Image.open(pictures / "dog/bmp.bmp")))
    assert y.tolist() == [1, 0]
    assert edl.images(table, paths="file", label="age", folder=pictures).read(0, 2)[1].tolist() == [3, 4]
    table.loc[1, "file"] = "cat/none.png"
    with pytest.raises(DataError, match=r"record 1: .*cat/none\.png: cannot be read: there is no such file"):
        edl.images(table, paths="file", folder=pictures)


def test_images_in_an_object_store(pictures: Path) -> None:
    store = fsspec.filesystem("memory")
    store.put(str(pictures), "/bucket/pictures", recursive=True)
    x, y = edl.images("memory://bucket/pictures").read(1, 3)
    assert np.array_equal(x, edl.images(pictures).read(1, 3)[0])
    assert y.tolist() == [0, 1]
    store.rm("/bucket", recursive=True)


def test_a_bad_image_is_named(pictures: Path) -> None:
    path = pictures / "dog" / "jpg.jpg"
    data = path.read_bytes()
    for bad, words in (
        (data[: len(data) // 2], "cannot be decoded as an image: image file is truncated"),
        (b"no image", "cannot be decoded as an image: cannot identify image file"),
        (b"", "cannot be decoded as an image"),
    ):
        path.write_bytes(bad)
        with pytest.raises(DataError, match=rf"dog/jpg\.jpg: {words}"):
            edl.images(pictures, size=(8, 8)).read(0, 4)
    Image.fromarray(np.zeros((10, 20, 3), np.uint8)).save(path)
    with pytest.raises(
        DataError, match=r"dog/jpg\.jpg: is 10 x 20, and .*cat/png\.png is 30 x 40; give size"
    ):
        edl.images(pictures).read(0, 4)
    Image.fromarray(np.full((30, 40), 1000, np.uint16)).save(pictures / "dog" / "deep.png")
    with pytest.raises(DataError, match=r"deep\.png: has values of more than 8 bits \(mode I;16\)"):
        edl.images(pictures, size=(8, 8)).read(0, 5)
    with pytest.raises(DataError, match=r"dog/bmp\.bmp: class 'dog' is unknown \(expected cat\)"):
        edl.images(pictures, classes=["cat"])
    (pictures / "alone.png").write_bytes((pictures / "cat" / "png.png").read_bytes())
    with pytest.raises(DataError, match=r"alone\.png: is in no folder of a class"):
        edl.images(pictures)


ROTATED = Image.Exif()
ROTATED[ExifTags.Base.Orientation] = 6  # by 90 degrees, which Keras ignores


def jpegs(folder: Path, mode: str, **options: Any) -> Any:
    """Write as many JPEG files as TensorFlow decodes together, and return their reader."""
    chance = np.random.default_rng(5)
    for nth in range(image_files.FEW):
        small = Image.fromarray(chance.integers(0, 256, (9, 7, 3), np.uint8))
        small.resize((83, 61)).convert(mode).save(folder / f"{nth}.jpg", quality=20 + 10 * nth, **options)
    return edl.images(folder)


def by_pillow(folder: Path) -> list[np.ndarray]:
    return [np.asarray(Image.open(path).convert("RGB")) for path in sorted(folder.glob("*.jpg"))]


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {"subsampling": "4:2:0"}),
        ("RGB", {"subsampling": "4:2:2"}),
        ("RGB", {"subsampling": "4:4:4"}),
        ("RGB", {"progressive": True}),
        ("L", {}),
        ("RGB", {"exif": ROTATED}),
    ],
)
def test_tensorflow_decodes_jpeg_files_to_the_values_of_pillow(
    mode: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tf.__version__  # the process has imported it
    reader = jpegs(tmp_path, mode, **options)
    with monkeypatch.context() as context:
        context.setattr(Image, "open", lambda *_: pytest.fail("Pillow was asked"))
        decoded = reader.take(np.arange(image_files.FEW)[::-1])
    assert np.array_equal(decoded[::-1], by_pillow(tmp_path))


def test_what_tensorflow_could_decode_differently_is_left_to_pillow(tmp_path: Path) -> None:
    reader = jpegs(tmp_path, "RGB")
    Image.open(tmp_path / "3.jpg").convert("CMYK").save(tmp_path / "3.jpg")
    Image.open(tmp_path / "5.jpg").save(tmp_path / "5.jpg", format="png")
    with pytest.raises(DataError, match=r"3\.jpg: the file was changed or replaced since the job began"):
        reader.read(0, len(reader))
    assert np.array_equal(edl.images(tmp_path).read(0, len(reader)), by_pillow(tmp_path))
    data = (tmp_path / "6.jpg").read_bytes()
    (tmp_path / "6.jpg").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"6\.jpg: cannot be decoded as an image: image file is truncated"):
        edl.images(tmp_path).read(0, len(reader))


def test_jpeg_files_that_change_while_tensorflow_reads_them_are_refused(tmp_path: Path) -> None:
    reader = jpegs(tmp_path, "RGB")
    os.utime(tmp_path / "2.jpg", (1, 1))
    with pytest.raises(DataError, match=r"2\.jpg: the file was changed .* another time of change"):
        reader.read(0, len(reader))
    (tmp_path / "2.jpg").unlink()
    with pytest.raises(DataError, match=r"2\.jpg: the file has been removed since the job began"):
        reader.read(0, len(reader))
