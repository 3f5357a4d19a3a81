# SPDX-License-Identifier: Apache-2.0
"""A reader over image files: a folder for each class, or a table of paths.

Pillow decodes them, or TensorFlow where it is faster and gives the same values (edl/data/formats/jpeg.py).
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from edl.data.base import Reader
from edl.data.files.addresses import Address, Addresses, File, find, is_glob, local_path
from edl.data.formats import jpeg
from edl.data.formats.opening import open_files
from edl.data.objects.in_memory import Arrays
from edl.data.objects.tables import by_column, is_table
from edl.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # by channels
_EXACT = (
    "1",
    "L",
    "LA",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBX",
    "CMYK",
    "YCbCr",
    "La",
    "RGBa",
)  # that Pillow converts from 8 bits
_BITS_PER_SAMPLE, _SAMPLE_FORMAT = 258, 339  # tags of TIFF
REQUESTS = 16  # images of an object store that are fetched at the same time
DECODERS = 4  # threads that decode at most: as many cores as a reader process has (data.workers=auto)
FEW = 8  # images for which threads are not worth their start


class Images:
    """Records of decoded images: `x`, or (x, y).

    Args:
        files: one for each record.
        labels: [records], or None.
        size: height and width; None: images keep their size, which must be the same.
        channels: 1, 3 or 4.
        classes: the names of the classes by number; empty if images have no labels, or numbers as labels.
        has_order: the user has named the classes, so their numbers must not change.
    """

    def __init__(
        self,
        files: Sequence[File],
        labels: np.ndarray | None,
        size: tuple[int, int] | None,
        channels: int,
        classes: Sequence[str] = (),
        has_order: bool = False,
    ):
        self._files, self._labels, self._size, self._mode = files, labels, size, MODES[channels]
        self.classes, self.has_order = tuple(classes), has_order
        self._is_near = all(file.is_local for file in files)

    def __len__(self) -> int:
        return len(self._files)

    def number_as(self, classes: Sequence[str], source: str) -> None:
        """Number the classes as `classes` does.

        Args:
            source: the name of these records, for messages.

        Raises:
            DataError: a record has a class that is not among `classes`, or the user gave other numbers.
        """
        assert self._labels is not None
        if self.classes == tuple(classes):
            return
        if self.has_order:
            raise DataError(
                f"{source}: classes is {', '.join(self.classes)}, and the model's labels were numbered "
                f"{', '.join(classes)}; give the same classes in each split"
            )
        known = {name: number for number, name in enumerate(classes)}
        numbers = np.array([known.get(name, -1) for name in self.classes], np.int64)
        found = numbers[self._labels]
        if (found < 0).any():
            record = int(found.argmin())
            raise DataError(
                f"{self._files[record].name}: class {self.classes[self._labels[record]]!r} of {source} is "
                f"not one of the training's classes ({', '.join(classes)}); leave its files out"
            )
        self._labels, self.classes = found, tuple(classes)

    def place(self, index: int) -> str:
        return self._files[index].name

    def read(self, start: int, stop: int) -> Any:
        """Return the records [start, stop): x is uint8 [n, height, width, channels].

        Raises:
            DataError: a file has changed or cannot be decoded, or images differ in size.
        """
        return self.take(np.arange(start, stop))

    def take(self, indices: np.ndarray) -> Any:
        """Return the records at `indices`.

        Raises:
            DataError: as for `read`.
        """
        files = [self._files[index] for index in indices.tolist()]
        x = None
        if self._is_near and self._size is None and self._mode == "RGB" and len(files) >= FEW:
            x = jpeg.decode(files)
        if x is None:
            x = self._by_pillow(files)
        return x if self._labels is None else (x, self._labels[indices])

    def _by_pillow(self, files: Sequence[File]) -> np.ndarray:
        # Decoders release Python's lock, and most of the time of a request is waiting.
        threads = min(len(os.sched_getaffinity(0)), DECODERS) if self._is_near else REQUESTS
        if (len(files) < FEW and self._is_near) or threads == 1:
            images = list(map(self._image, files))
        else:
            with ThreadPoolExecutor(threads) as pool:
                images = list(pool.map(self._image, files))
        for image, file in zip(images, files, strict=True):
            if image.shape != images[0].shape:
                raise DataError(
                    f"{file.name}: is {image.shape[0]} x {image.shape[1]}, and {files[0].name} is "
                    f"{images[0].shape[0]} x {images[0].shape[1]}; give size=(height, width)"
                )
        empty = (0, *(self._size or (0, 0)), len(self._mode))
        return np.stack(images) if images else np.zeros(empty, np.uint8)

    def _image(self, file: File) -> np.ndarray:
        return self._decoded(_content(file), file.name)

    def _decoded(self, data: bytes, name: str) -> np.ndarray:
        from PIL import Image

        stream = io.BytesIO(data)
        try:
            with Image.open(stream) as image:
                _refuse_deep(image, data, name)
                if self._size is not None:
                    height, width = self._size
                    image.draft(self._mode, (width, height))  # JPEG decodes large images at 1/2, 1/4 or 1/8
                decoded = image if image.mode == self._mode else image.convert(self._mode)
                if self._size is not None and decoded.size != (width, height):
                    decoded = decoded.resize((width, height), Image.Resampling.BILINEAR)
                pixels = np.asarray(decoded, np.uint8)
        except DataError:
            raise
        except Exception as error:  # Pillow's decoders have no common error
            why = str(error).replace(f" {stream!r}", "")
            raise DataError(f"{name}: cannot be decoded as an image: {why}") from error
        return pixels.reshape(*pixels.shape[:2], len(self._mode))


def _refuse_deep(image: Any, data: bytes, name: str) -> None:
    """Refuse an image whose values Pillow would change.

    Pillow opens PNG and TIFF images of 16 bits per value in the mode RGB, and drops the lower 8 bits.

    Args:
        image: as Pillow has opened it.
        data: the file.

    Raises:
        DataError: the image has values of more than 8 bits, or a colour space that is not RGB.
    """
    bits = 8
    if image.format == "PNG":
        bits = data[24]  # after the signature and the beginning of the header
    elif image.format == "TIFF":
        bits = max(image.tag_v2.get(_BITS_PER_SAMPLE, (1,)))
    if bits > 8 or image.mode.startswith(("I", "F")):
        raise DataError(
            f"{name}: has values of more than 8 bits (mode {image.mode}), which would be cut off; convert it "
            "to 8 bits"
        )
    is_signed = image.format == "TIFF" and max(image.tag_v2.get(_SAMPLE_FORMAT, (1,))) > 1
    if image.mode not in _EXACT or is_signed:
        how = f"{image.mode} with signed values" if is_signed else image.mode
        raise DataError(f"{name}: is in the mode {how}, which edl does not read; convert it to RGB")


def images(
    path: Addresses | Any,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    *,
    classes: Sequence[str] = (),
    paths: str | None = None,
    label: str | None = None,
    folder: Address | None = None,
) -> Reader:
    """A reader over images: JPEG, PNG, GIF (the first frame), BMP, WebP and TIFF.

    Records are (x, y), or x if there are no labels. x is uint8 [n, height, width, channels], from 0 to 255; y
    is int64 [n], the number of the class, or the numbers of the table. One batch of images is in memory.

    Args:
        path: a directory with a folder for each class; or, if `paths` is given, a table: a file that
            `open_files` reads, or a table of pandas, Polars or Arrow. A glob, a list of files or a directory
            without folders gives images without labels.
        size: (height, width) to which images are resized, bilinear and antialiased; by default they keep
            their size, which must be the same for all.
        channels: 1 (grey), 3 (RGB) or 4 (RGBA).
        classes: the names of the classes by number; by default the names of the folders, or those in the
            table, sorted. In a job, all splits have the classes of the training.
        paths: the table's column of paths.
        label: the table's column of labels: numbers, or names of classes.
        folder: the directory or address to which the table's paths are relative; by default that of
            the table.

    Raises:
        DataError: a file is missing, changes or cannot be decoded, or a class is unknown.
    """
    if channels not in MODES:
        raise DataError(f"edl.images: channels is {channels}; expected 1, 3 or 4")
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise DataError(f"edl.images: size is {size}; expected (height, width), such as (224, 224)")
    if size is not None:
        size = int(size[0]), int(size[1])
    if paths is not None:
        files, names, labels = _of_table(path, paths, label, folder, classes)
    elif label is not None or folder is not None:
        raise DataError("edl.images: label and folder are options of a table; name its column with paths")
    else:
        files, names, labels = _of_folders(path, classes)
    return Images(files, labels, size, channels, names, bool(classes))


def classes_of(reader: Any) -> tuple[str, ...]:
    """The names of the classes by number, where images have labels that are names; otherwise empty."""
    found = _images(reader)
    return () if found is None else found.classes


def number_as(reader: Any, classes: Sequence[str], source: str) -> None:
    """Number the classes of a reader that has some as `classes` does.

    Raises:
        DataError: as for `Images.number_as`.
    """
    if (found := _images(reader)) is not None and found.classes:
        found.number_as(classes, source)


def _images(reader: Any) -> Images | None:
    """The images below a split or selection of their records."""
    while reader is not None and not isinstance(reader, Images):
        reader = getattr(reader, "underlying", None)
    return reader


def _of_folders(
    path: Addresses, classes: Sequence[str]
) -> tuple[list[File], Sequence[str], np.ndarray | None]:
    files = find(path, SUFFIXES, "images")
    if not isinstance(path, str | os.PathLike) or is_glob(os.fspath(path)):
        return files, (), None
    root = local_path(os.fspath(path)).rstrip("/")
    parts = [file.name.removeprefix(root).lstrip("/").split("/") for file in files]
    if all(len(names) == 1 for names in parts) and not classes:
        return files, (), None
    for file, names in zip(files, parts, strict=True):
        if len(names) == 1:
            raise DataError(f"{file.name}: is in no folder of a class; {root} has folders for other images")
    folders = [names[0] for names in parts]
    classes = classes or sorted({*folders, *_empty_folders(root)})
    return files, classes, _numbers(folders, classes, [file.name for file in files])


def _empty_folders(root: str) -> list[str]:
    """The folders of a directory, also those without files: these are classes, as in Keras."""
    if "://" in root:  # stores have no folders without files
        return []
    return [path.name for path in Path(root).iterdir() if path.is_dir() and path.name[0] not in "._"]


def _of_table(
    table: Any, paths: str, label: str | None, folder: Address | None, classes: Sequence[str]
) -> tuple[list[File], Sequence[str], np.ndarray | None]:
    if is_table(table):
        columns, source, near = by_column(table, "edl.images"), "edl.images", ""
    else:
        reader = open_files(table, names=[paths] if label is None else [paths, label])
        columns, source = reader.read(0, len(reader)), str(table)
        near = os.path.dirname(local_path(os.fspath(table)))
    for name in (paths, label):
        if name is not None and name not in columns:
            raise DataError(f"{source}: column {name!r} is missing; there are {', '.join(columns)}")
    Arrays({paths: columns[paths]}, source)
    root = local_path(os.fspath(folder)) if folder is not None else near
    files = []
    for record, name in enumerate(columns[paths].tolist()):
        address = (
            name if "://" in name or Path(name).is_absolute() or not root else f"{root.rstrip('/')}/{name}"
        )
        try:
            files += find(address, reader="images")
        except DataError as error:
            raise DataError(f"{source}: record {record}: {error}") from error
    if label is None:
        return files, (), None
    labels = columns[label]
    if labels.dtype.kind in "biuf" and not classes:
        return files, (), labels
    places = [f"{source}: record {record}" for record in range(len(labels))]
    names = [str(value) for value in labels.tolist()]
    classes = classes or sorted(set(names))
    return files, classes, _numbers(names, classes, places)


def _numbers(names: Sequence[str], classes: Sequence[str], places: Sequence[str]) -> np.ndarray:
    """The number of each record's class.

    Raises:
        DataError: a record has a class that is not in `classes`.
    """
    known = {name: number for number, name in enumerate(classes)}
    for name, place in zip(names, places, strict=True):
        if name not in known:
            raise DataError(f"{place}: class {name!r} is unknown (expected {', '.join(known)})")
    return np.array([known[name] for name in names], np.int64)


def _content(file: File) -> bytes:
    return file.read(0, file.size)
