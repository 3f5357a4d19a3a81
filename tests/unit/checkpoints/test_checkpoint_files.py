# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a directory are read whole or not at all, after any damage to files, disk or writers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.checkpoints import (
    Checkpoint,
    CheckpointDamaged,
    CheckpointError,
    CheckpointFile,
    Store,
    Tensor,
    files,
)
from edl.checkpoints.manifest import decode, encode
from edl.checkpoints.tensors import DTYPES, PIECE, layout, pieces
from edl.contract import hangs
from tests.support.checkpoints.checkpoints import TENSORS, equal, manifest_of, of_size, unexpected, write

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[3]
BLOCK = 4096


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "checkpoints"))


def files_of(store: Store, checkpoint: Checkpoint) -> list[Path]:
    return sorted((Path(store.place.where) / checkpoint.directory).iterdir())


def newest(store: Store) -> int:
    """The step of the newest whole checkpoint; all that are skipped are reported."""
    said: list[str] = []
    found = store.newest(said.append)
    assert found is not None
    assert len(said) == sum(c.step > found.step for c in store.checkpoints())
    return found.step


def is_damaged(store: Store) -> bool:
    """Whether the one that is there is."""
    try:
        store.checkpoints()[0].verify()
    except CheckpointDamaged:
        return True
    return False


def sealed(body: dict[str, Any]) -> bytes:
    """A manifest that any program could have written."""

    def text(body: dict[str, Any]) -> bytes:
        return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()

    body.pop("sha256", None)
    return text({**body, "sha256": hashlib.sha256(text(body)).hexdigest()})


# --- damage -----------------------------------------------------------------------------------------------


def test_one_that_is_truncated_anywhere_is_passed_over(store: Store) -> None:
    write(store, 1)
    manifest, *parts = files_of(store, write(store, 2, tensors=of_size(100_000, 2)))
    for path in (manifest, *parts):
        whole = path.read_bytes()
        for length in range(0, len(whole), BLOCK):
            path.write_bytes(whole[:length])
            assert newest(store) == 1, (path.name, length)
        path.write_bytes(whole + b"\n")
        assert newest(store) == 1, path.name
        path.write_bytes(whole)
    assert newest(store) == 2
    raw = manifest.read_bytes()
    for length in range(len(raw)):
        with pytest.raises(CheckpointDamaged):
            decode(raw[:length])


def test_a_thousand_of_a_thousand_flipped_bits_are_found(store: Store) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    print(f"seed {seed}")
    files = files_of(store, write(store, 2, tensors=of_size(30_000, 2)))
    for _ in range(1000):
        path = chance.choice(files)
        with open(path, "r+b", buffering=0) as file:
            place, bit = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
            [byte] = os.pread(file.fileno(), 1, place)
            os.pwrite(file.fileno(), bytes([byte ^ bit]), place)
            assert is_damaged(store), (path.name, place, bit)
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert newest(store) == 2


def test_one_that_lies_in_the_directory_of_another_is_damaged(store: Store) -> None:
    copied = write(store, 1)
    Path(store.place.where, copied.directory).rename(Path(store.place.where, "step-000000000002-1"))
    with pytest.raises(CheckpointDamaged, match="holds the manifest of step 1, attempt '1'"):
        store.checkpoints()[0].verify()


def test_one_of_a_newer_edl_is_not_passed_over(store: Store) -> None:
    write(store, 1)
    manifest = files_of(store, write(store, 2))[0]
    manifest.write_bytes(sealed(json.loads(manifest.read_bytes()) | {"version": 2, "more": "than we know"}))
    with pytest.raises(
        CheckpointError, match="has version 2, this edl knows versions up to 1: use a newer edl"
    ):
        store.load_newest(unexpected)
    with pytest.raises(CheckpointError, match="use a newer edl"):
        store.prune(1)


def test_a_directory_that_cannot_be_read_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: cannot list the checkpoints: Not a directory"):
        Store.open(str(tmp_path / "file")).newest(unexpected)


# --- a checkpoint is data, and stays in its directory -------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "", ".", "..", ".hidden", "manifest.json", "a/b", "a\nb"]
)
def test_a_name_that_is_no_file_of_the_checkpoint_is_refused(store: Store, name: str) -> None:
    made = write(store, 1)
    part = replace(made.manifest.parts[0], name=name)
    with pytest.raises(ValueError, match="is not the name of a file"):
        encode(replace(made.manifest, parts=(part, made.manifest.parts[1])))
    body = json.loads(encode(made.manifest))
    body["parts"][0]["name"] = name
    with pytest.raises(CheckpointDamaged, match="is not the name of a file"):
        decode(sealed(body))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"step": -1}, "a count is negative"),
        ({"step": "1"}, "step: Input should be a valid integer"),
        ({"extra": 1}, "extra: Unexpected keyword argument"),
        ({"variables": [{"name": "a", "dtype": "x", "shape": [1], "part": 9}]}, "there are 2 parts"),
        ({"variables": [{"name": "a", "dtype": "x", "shape": [-1], "part": 0}]}, "has the shape"),
        ({"variables": [{"name": "a", "dtype": "x", "shape": [], "part": 0}] * 2}, "have the same name"),
        ({"parts": [{"name": "a", "nbytes": -1, "sha256": "0" * 64}] * 2}, "two parts have the same name"),
        (
            {"parts": [{"name": "a", "nbytes": -1, "sha256": "0" * 64}], "variables": []},
            "no size or no SHA-256",
        ),
    ],
)
def test_a_manifest_that_makes_no_sense_is_damaged(store: Store, change: dict[str, Any], why: str) -> None:
    body = json.loads(encode(write(store, 1).manifest))
    with pytest.raises(CheckpointDamaged, match=why):
        decode(sealed(body | change))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"sha256":1}', b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_manifest_is_damaged(raw: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        decode(raw)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (3).to_bytes(8, "little") + b"\xff\xff\xff",
        (2).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_file_that_holds_other_things_than_its_tensors_is_damaged(store: Store, content: bytes) -> None:
    """Although its SHA-256 is right."""
    made = write(store, 1, parts=1)
    manifest, part = files_of(store, made)
    part.write_bytes(content)
    parts = (CheckpointFile(part.name, len(content), hashlib.sha256(content).hexdigest()),)
    manifest.write_bytes(encode(replace(made.manifest, parts=parts)))
    for look in (Checkpoint.verify, Checkpoint.read):
        with pytest.raises(CheckpointDamaged, match=r"part-00000-of-00001-\w+\.safetensors"):
            look(store.checkpoints()[0])


def test_no_link_is_followed_out_of_the_directory(store: Store, tmp_path: Path) -> None:
    write(store, 1)
    part = files_of(store, write(store, 2))[1]
    outside = tmp_path / "outside"
    part.rename(outside)
    part.symlink_to(outside)
    assert newest(store) == 1
    write(store, 4)
    store.prune(1)
    assert outside.stat().st_size > 0
    assert part.is_symlink()  # not ours, and nothing else of step 2 is left
    assert [path.name for path in part.parent.iterdir()] == [part.name]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_checkpoint_that_is_a_link_is_refused_and_never_left_out(
    store: Store, tmp_path: Path, is_there: bool
) -> None:
    write(store, 1)
    moved = Path(store.place.where, write(store, 2).directory)
    if is_there:
        moved.rename(tmp_path / moved.name)
    else:
        shutil.rmtree(moved)
    moved.symlink_to(tmp_path / moved.name)
    for look in (store.checkpoints, lambda: store.newest(pytest.fail), lambda: store.prune(1)):
        with pytest.raises(
            CheckpointError,
            match=rf"cannot list the checkpoints: {moved.name} is a symbolic link; move the directory itself",
        ):
            look()
    moved.unlink()
    assert newest(store) == 1


def test_the_directory_of_all_checkpoints_may_be_a_link(store: Store, tmp_path: Path) -> None:
    write(store, 1)
    (tmp_path / "link").symlink_to(store.place.where)
    assert newest(Store.open(str(tmp_path / "link"))) == 1


def test_a_pipe_is_not_waited_for(store: Store) -> None:
    write(store, 1)
    part = files_of(store, write(store, 2))[1]
    part.unlink()
    os.mkfifo(part)
    assert newest(store) == 1


def test_what_others_keep_in_the_directory_stays(store: Store) -> None:
    root = Path(store.place.where)
    (root / "lost+found").mkdir(parents=True)
    (root / "notes.txt").write_text("mine")
    (root / "step-000000000001-1").mkdir()
    (root / "step-000000000001-1" / "notes.txt").write_text("mine")
    (root / "step-1-1").mkdir()
    write(store, 2)
    store.prune(1)
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    assert left[:2] == ["lost+found", "notes.txt"]
    assert "step-1-1" in left and [c.step for c in store.checkpoints()] == [2]


# --- the format ---------------------------------------------------------------------------------------------


def test_others_can_read_the_tensors(store: Store) -> None:
    checkpoint = write(store, 1, parts=1)
    part = files_of(store, checkpoint)[1]
    found = dict(safetensors.deserialize(part.read_bytes()))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        if tensor.dtype in DTYPES:
            assert (found[name]["dtype"], found[name]["shape"]) == (
                DTYPES[tensor.dtype][0],
                list(tensor.shape),
            )
        assert found[name]["data"] == tensor.data
    arrays = safetensors.numpy.load(safetensors.numpy.save({"x": np.eye(3, dtype=np.float32)}))
    assert arrays["x"].shape == (3, 3)


def test_a_header_of_others_is_understood() -> None:
    data = safetensors.numpy.save(
        {"a": np.arange(5, dtype=np.int16), "b": np.ones((2, 2))}, metadata={"format": "np"}
    )
    size = int.from_bytes(data[:8], "little")
    assert layout(data[8 : 8 + size], len(data) - 8 - size) == {"b": 32, "a": 10}


NUMBERS = ["float64", "float32", "float16", "int64", "int8", "uint16", "bool", "complex64"]


@settings(max_examples=30)
@given(
    st.dictionaries(
        st.text(max_size=20).filter(lambda name: name != "__metadata__" and name.isprintable()),
        st.tuples(st.sampled_from(NUMBERS), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_any_tensors_make_a_file_that_safetensors_reads(types: dict[str, tuple[str, list[int]]]) -> None:
    tensors = {name: Tensor.of(np.ones(shape, dtype)) for name, (dtype, shape) in types.items()}
    data = b"".join(pieces(tensors))
    found = safetensors.numpy.load(data)
    assert {name: (a.dtype.name, list(a.shape)) for name, a in found.items()} == types
    assert all(found[name].tobytes() == tensor.data for name, tensor in tensors.items())
    size = int.from_bytes(data[:8], "little")
    starts = np.cumsum([8 + size, *layout(data[8 : 8 + size], len(data) - 8 - size).values()])
    for start, name in zip(starts, layout(data[8 : 8 + size], len(data) - 8 - size), strict=False):
        assert start % np.dtype(types[name][0]).itemsize == 0, "not aligned"


def test_a_tensor_of_another_size_than_its_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 \[2, 3\] takes 24 bytes, not 8"):
        Tensor("float32", (2, 3), memoryview(b"12345678"))


def test_neither_writing_nor_reading_copies_the_state(store: Store) -> None:
    nbytes = 48 << 20
    state = of_size(nbytes, 1)
    write(store, 1, tensors=of_size(300, 1))  # what is imported once is imported
    tracemalloc.start()
    try:
        checkpoint = write(store, 2, tensors=state, parts=1)
        assert tracemalloc.get_traced_memory()[1] < nbytes / 40
        tracemalloc.reset_peak()
        checkpoint.verify()
        assert tracemalloc.get_traced_memory()[1] < 4 * PIECE
        tracemalloc.reset_peak()
        found = checkpoint.read()
        assert nbytes < tracemalloc.get_traced_memory()[1] < 1.05 * nbytes
    finally:
        tracemalloc.stop()
    assert equal(found, state)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_weights_that_are_not_finite_are_not_kept(store: Store, dtype: str, value: float) -> None:
    def tensor(values: np.ndarray) -> Tensor:
        if dtype == "bfloat16":
            halves = values.astype("<f4").view("<u2")[1::2]
            return Tensor(dtype, halves.shape, np.ascontiguousarray(halves).data)
        return Tensor.of(values.astype(dtype))

    good = tensor(np.linspace(-1e4, 1e4, 1000))
    bad = tensor(np.array([0.0] * 999 + [value]))
    writing = store.begin(1, "1")
    with pytest.raises(CheckpointError, match="variable 'b' is not finite"):
        writing.write_part(0, 1, {"a": good, "b": bad}, finite={"a", "b"})
    assert store.unfinished()[0].files == {}
    writing.write_part(0, 1, {"a": good, "b": bad}, finite={"a"})


# --- processes that are killed, disks that are full ---------------------------------------------------------


def test_who_is_killed_while_it_writes_takes_nothing_along(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    command = [
        sys.executable,
        "-m",
        "tests.support.checkpoints.killed_checkpoints",
        str(tmp_path / "checkpoints"),
        str(seed),
        "50",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < 50, "all of them, or none, were completed: none was killed in the middle"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which takes root")
def test_a_full_disk_takes_nothing_along(small_disk: Path) -> None:
    store = Store.open(str(small_disk))
    write(store, 1, tensors=of_size(1 << 20, 1))
    writing = store.begin(2, "1")
    with pytest.raises(CheckpointError) as error:
        writing.write_part(0, 1, of_size(5 << 20, 2))
    assert str(error.value) == f"{small_disk}: cannot write the checkpoint of step 2: No space left on device"
    assert store.unfinished()[0].files == {}, "it keeps the room that others need"
    part = writing.write_part(0, 1, of_size(1 << 20, 2))
    with open(small_disk / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while ballast.write(bytes(1 << 12)):
            pass
    manifest = manifest_of(2, of_size(1 << 20, 2), (part,))
    with pytest.raises(
        CheckpointError, match="cannot commit the checkpoint of step 2: No space left on device"
    ):
        writing.commit(manifest)
    assert newest(store) == 1 and store.prune(1) == []
    (small_disk / "ballast").unlink()
    writing.commit(manifest)
    assert newest(store) == 2


# --- stores that hang --------------------------------------------------------------------------------------


def test_a_store_that_hangs_is_given_up_and_is_used_again_when_it_answers(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are written on a thread that waits for an event, as the kernel has it wait for a dead mount."""
    answers, writing = threading.Event(), threading.Event()
    write_past_cache = files._write_past_cache

    def hanging(descriptor: int, some: Iterator[memoryview]) -> None:
        writing.set()
        answers.wait()
        write_past_cache(descriptor, some)

    monkeypatch.setattr(files, "_write_past_cache", hanging)
    monkeypatch.setattr(hangs, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(hangs, "END_SECONDS", 0.1)
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 1: no answer for"):
        store.begin(1, "a").write_part(0, 1, TENSORS)
    assert writing.wait(60)
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 2: an earlier call still"):
        store.begin(2, "a").write_part(0, 1, TENSORS)
    with pytest.raises(CheckpointError, match="cannot list the checkpoints: an earlier call still"):
        store.prune(1)
    (hanging_thread,) = [thread for thread in threading.enumerate() if thread.name == "bounded"]
    answers.set()
    hanging_thread.join()
    monkeypatch.setattr(hangs, "END_SECONDS", 600.0)
    assert store.checkpoints() == []
    write(store, 3)
    assert newest(store) == 3
