# SPDX-License-Identifier: Apache-2.0
"""One contract for all places of checkpoints: a directory, memory, S3, and the volume of a master."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest

from edl.checkpoints import CheckpointDamaged, CheckpointError, Store, Tensor, one_of
from edl.compat.elasticdl.checkpoint_files import files_in
from edl.errors import StoreUnavailable
from tests.contract.conftest import Place
from tests.support.checkpoints.checkpoints import TENSORS, equal, manifest_of, of_size, unexpected, write
from tests.support.checkpoints.s3 import BUCKET, Account

ROOT = Path(__file__).parents[2]


def test_an_account_with_rights_below_the_address_alone_finds_that_nothing_is_there_yet(s3: Account) -> None:
    """This test must be the first one here, because later tests write to the store."""
    assert fsspec.filesystem("s3", skip_instance_cache=True).find(BUCKET) == []
    assert Store.open(s3.url).newest(unexpected) is None
    assert files_in(s3.url) == []


def test_what_is_read_is_what_was_written_bit_for_bit(place: Place) -> None:
    assert place.store.newest(unexpected) is None and place.store.load_newest(unexpected) is None
    written = write(
        place.store, 7, metrics={"loss": float("inf"), "accuracy": 1}, config={"training.seed": 3}
    )
    loaded = place.store.load_newest(unexpected)
    assert loaded is not None and loaded.checkpoint.manifest == written.manifest
    assert loaded.checkpoint.manifest.metrics == {"loss": float("inf"), "accuracy": 1.0}
    assert equal(loaded.tensors, TENSORS)


def test_a_part_of_many_requests_is_read_as_it_was_written(place: Place) -> None:
    state = of_size(20 << 20, step=3)
    write(place.store, 3, tensors=state, parts=1)
    loaded = place.store.load_newest(unexpected)
    assert loaded is not None and equal(loaded.tensors, state)


def test_the_newest_is_that_of_the_largest_step(place: Place) -> None:
    for step in (9, 1200, 100):
        write(place.store, step)
    assert [c.step for c in place.store.checkpoints()] == [9, 100, 1200]
    newest = place.store.newest(unexpected)
    assert newest is not None and newest.step == 1200


def test_one_to_begin_with_is_the_newest_whole_one_or_the_one_that_is_named(place: Place) -> None:
    with pytest.raises(CheckpointError, match="no whole checkpoint found"):
        one_of(place.url)
    first, second = (write(place.store, step) for step in (1, 2))
    said: list[str] = []
    assert one_of(place.url).step == one_of(place.url, said.append).step == 2
    assert one_of(f"{place.url}/{first.directory}").step == 1
    part = place.files(second.directory)[-1]
    data = place.client.cat_file(part)
    place.client.pipe_file(part, data[:-1] + bytes([data[-1] ^ 1]))
    assert one_of(place.url, said.append).step == 1 and "step 2 is passed over" in said[0]
    place.client.pipe_file(part, data[:-1])
    assert one_of(place.url).step == 1
    with pytest.raises(CheckpointDamaged, match="bytes"):
        one_of(f"{place.url}/{second.directory}")
    with pytest.raises(CheckpointError, match="no checkpoint found"):
        one_of(f"{place.url}/step-000000000009-1")


def test_what_is_not_completed_is_no_checkpoint(place: Place) -> None:
    write(place.store, 1)
    place.store.begin(2, "1").write_part(0, 2, TENSORS)
    newest = place.store.newest(unexpected)
    assert newest is not None and newest.step == 1
    assert [c.step for c in place.store.unfinished()] == [2]


@pytest.mark.parametrize(
    "damage", ["flipped", "truncated", "missing", "torn manifest", "no manifest's bytes"]
)
def test_a_damaged_one_is_passed_over_with_a_word(place: Place, damage: str) -> None:
    write(place.store, 1)
    later = write(place.store, 2)
    manifest, part = place.files(later.directory)[0], place.files(later.directory)[-1]
    assert manifest.endswith("manifest.json")
    match damage:
        case "flipped":
            data = place.client.cat_file(part)
            place.client.pipe_file(part, data[:-1] + bytes([data[-1] ^ 1]))
        case "truncated":
            place.client.pipe_file(part, place.client.cat_file(part)[:-1])
        case "missing":
            place.client.rm_file(part)
        case "torn manifest":
            place.client.pipe_file(manifest, place.client.cat_file(manifest)[:99])
        case _:
            place.client.pipe_file(manifest, b"")
    said: list[str] = []
    newest, loaded = place.store.newest(said.append), place.store.load_newest(said.append)
    assert newest is not None and loaded is not None
    assert newest.step == loaded.checkpoint.step == 1
    assert len(said) == 2 and all(
        later.directory in line and "step 2 is passed over" in line for line in said
    )
    with pytest.raises(CheckpointDamaged):
        place.store.checkpoints()[-1].verify()


def test_a_commit_may_be_repeated_and_cannot_be_changed(place: Place) -> None:
    made = write(place.store, 5)
    writing = place.store.begin(5, "1")
    again = writing.commit(replace(made.manifest, created="later, by a different worker"))
    assert again.manifest == made.manifest
    other = writing.write_part(0, 1, TENSORS)
    with pytest.raises(CheckpointError, match="step 5 has been committed with other parts"):
        writing.commit(manifest_of(5, TENSORS, (other,)))
    assert place.store.checkpoints()[0].manifest == made.manifest


def test_one_of_two_that_commit_at_once_wins(place: Place) -> None:
    states = [of_size(300, 1), of_size(300, 2)]
    both = threading.Barrier(2)
    failed = []

    def commit(state: dict[str, Tensor]) -> None:
        writing = place.store.begin(1, "1")
        manifest = manifest_of(1, state, (writing.write_part(0, 1, state),))
        both.wait(10)
        try:
            writing.commit(manifest)
        except CheckpointError:
            failed.append(state)

    writers = [threading.Thread(target=commit, args=(state,)) for state in states]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    [lost] = failed
    [kept] = place.store.checkpoints()
    assert equal(kept.read(), next(state for state in states if state is not lost))


def test_two_writers_of_one_part_leave_each_other_alone(place: Place) -> None:
    first, second = place.store.begin(1, "1"), place.store.begin(1, "1")
    one, two = first.write_part(0, 1, TENSORS), second.write_part(0, 1, of_size(300, 1))
    assert one.name != two.name
    first.commit(manifest_of(1, TENSORS, (one,)))
    loaded = place.store.load_newest(unexpected)
    assert loaded is not None and equal(loaded.tensors, TENSORS)


def test_without_all_parts_nothing_is_committed(place: Place) -> None:
    writing = place.store.begin(1, "1")
    part = writing.write_part(0, 1, TENSORS)
    place.client.rm_file(place.files()[0])
    with pytest.raises(
        CheckpointError, match=r"part-00000-of-00001-\w+.safetensors has no bytes, its writer"
    ):
        writing.commit(manifest_of(1, TENSORS, (part,)))
    assert place.store.checkpoints() == []


def test_a_part_that_fails_in_the_middle_leaves_nothing(place: Place) -> None:
    state = of_size(20 << 20, 1)
    state["v2"] = Tensor.of(np.array([np.nan], np.float32))
    with pytest.raises(CheckpointError, match="variable 'v2' is not finite"):
        place.store.begin(1, "1").write_part(0, 1, state, finite=state)
    assert place.files() == []
    if place.url.startswith("s3"):
        begun = place.client.call_s3("list_multipart_uploads", Bucket=BUCKET)
        assert not begun.get("Uploads")


def test_an_attempt_that_is_given_up_leaves_nothing(place: Place) -> None:
    write(place.store, 1)
    before = place.files()
    writing = place.store.begin(2, "1")
    writing.abandon()  # nothing was written yet
    writing.write_part(0, 2, TENSORS)
    writing.abandon()
    place.store.begin(1, "1").abandon()  # this step is committed, so it stays
    assert place.files() == before


def test_files_of_elasticdl_are_those_of_its_newest_complete_version(place: Place) -> None:
    assert files_in(place.url) == []
    write(place.store, 1)
    assert files_in(place.url) == [], "it is a checkpoint of edl"

    def put(path: str, data: bytes) -> None:
        if "file" in place.client.protocol:
            Path(place.root, path).parent.mkdir(parents=True, exist_ok=True)
        place.client.pipe_file(f"{place.root}/{path}", data)

    for version in (9, 30):
        for server in range(2):
            put(f"version-{version}/variables-{server}-of-2.ckpt", f"{version} {server}".encode())
    put("version-100/variables-1-of-2.ckpt", b"its other server is still writing")
    put("version-30/variables-0-of-2.ckpt.tmp", b"of a copy")
    assert [file.read() for file in files_in(place.url)] == [b"30 0", b"30 1"]
    assert [file.read() for file in files_in(f"{place.url}/version-9/")] == [b"9 0", b"9 1"]
    with pytest.raises(CheckpointError, match=r"/version-100: incomplete .*: variables-0-of-2.ckpt is miss"):
        files_in(f"{place.url}/version-100")

    found = files_in(place.url)
    put("version-30/variables-1-of-2.ckpt", b"30")  # copied anew, and not yet complete
    with pytest.raises(CheckpointDamaged, match=r"/version-30/variables-1-of-2.ckpt: truncated: 2 of 4 byte"):
        found[1].read()
    put("version-30/variables-1-of-2.ckpt", b"")
    with pytest.raises(CheckpointDamaged, match=r"variables-1-of-2.ckpt: truncated: 0 of 0 bytes"):
        files_in(place.url)[1].read()
    place.client.rm_file(f"{place.root}/version-30/variables-1-of-2.ckpt")
    with pytest.raises(CheckpointError, match=r"cannot read variables-1-of-2.ckpt of version-30: "):
        found[1].read()


@pytest.mark.usefixtures("s3")
def test_a_store_that_is_not_there_is_no_empty_store() -> None:
    with pytest.raises(
        CheckpointError, match=r"s3://else: cannot list the checkpoints: .*bucket does not exist"
    ) as refused:
        Store.open("s3://else").checkpoints()
    assert not isinstance(refused.value, StoreUnavailable), "it is not made by waiting for it"
    with pytest.raises(CheckpointError, match="s3://else/a: cannot write the checkpoint of step 1: "):
        Store.open("s3://else/a").begin(1, "1").write_part(0, 1, TENSORS)
    with pytest.raises(CheckpointError, match=r"nothing://here: Protocol not known: nothing"):
        Store.open("nothing://here")


def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    client = fsspec.get_filesystem_class("s3")
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setattr(client, "retries", 1)
        client.clear_instance_cache()  # cached clients have the address of a different server
        try:
            with pytest.raises(StoreUnavailable, match=r"s3://bucket/a: cannot list .* Could not connect"):
                Store.open("s3://bucket/a").newest(unexpected)
            with pytest.raises(
                CheckpointError, match=r"cannot write the checkpoint of step 1: .* not connect"
            ):
                Store.open("s3://bucket/a").begin(1, "1").write_part(0, 1, TENSORS)
        finally:
            client.clear_instance_cache()


WRITE_AND_PRUNE = """
import sys
from edl.checkpoints import Store
from tests.support.checkpoints.s3 import BUCKET, Account, serving
from tests.support.checkpoints.checkpoints import TENSORS, equal, unexpected, write
store = Store.open(sys.argv[1])
for step in (1, 2, 3):
    write(store, step)
assert len(store.prune(2)) == 1
assert equal(store.load_newest(unexpected).tensors, TENSORS)
"""


def test_an_account_comes_by_the_environment_as_from_the_charts_secret(s3: Account) -> None:
    def as_a_worker(account: Account) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", WRITE_AND_PRUNE, url],
            env=os.environ | account.variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )

    url = f"{s3.url}/one"
    done = as_a_worker(s3)
    assert done.returncode == 0, done.stderr
    refused = as_a_worker(s3.forged)
    assert f"errors.CheckpointError: {url}: cannot write the checkpoint of" in refused.stderr
    assert s3.forged.secret not in refused.stderr


def test_who_may_not_remove_is_told_that_nothing_was_set_aside(s3: Account) -> None:
    """Otherwise a training that has rolled back would later be resumed from a superseded checkpoint."""
    url = f"{s3.url}/two"
    for step in (1, 2):
        write(Store.open(url), step)
    with pytest.MonkeyPatch.context() as patch:
        for name, text in s3.without("DeleteObject").variables.items():
            patch.setenv(name, text)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        with pytest.raises(
            CheckpointError, match=f"{url}: cannot set aside the checkpoint of step 2: .*enied"
        ):
            Store.open(url).supersede(after=1)
        assert [c.step for c in Store.open(url).checkpoints()] == [1, 2]
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert [c.step for c in Store.open(url).supersede(after=1)] == [2]
    assert [c.step for c in Store.open(url).checkpoints()] == [1]
