# SPDX-License-Identifier: Apache-2.0
"""`edl audit --release`, `edl report --release`: a journal, copied from the pod of its master and read here.

The journal and the summary are in the master's container, and are read with `cat` through the API server, as
in `kubectl cp`. The received files are not trusted: the chain of hashes and the summary show whether the copy
is complete. The exported model is on the output volume, or on the master's. Its digests are computed
in a pod that has the volume, so that only the digests are transferred.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from edl.cli.release.model import MASTER, OUTPUT, Reading, acting, mounted
from edl.cli.release.status import LOST, FoundRelease
from edl.cli.shared.proof import prove
from edl.contract import artifacts, exports
from edl.errors import EdlError
from edl.journal.audit import Elsewhere
from edl.journal.format import JournalReader
from edl.kubernetes.client import Api
from edl.kubernetes.informer import Object


def audit(loop: asyncio.Runner, api: Api, found: FoundRelease, masters: Sequence[Object]) -> str:
    """Audit the release's job; return the verdict as text.

    Args:
        masters: the pods of the release's masters.

    Raises:
        EdlError: the job has not ended, its journal is lost, or the audit failed.
        ApiError: the API refuses, or does not answer.
    """
    where = f"release {found.release}"
    if not found.ended:
        raise EdlError(f"{where}: the job has not ended: {found.phase}, {found.reason}")
    with copied(loop, api, found, masters) as copy:
        return prove(copy, loop.run(_elsewhere(api, found, copy)))


@contextmanager
def copied(loop: asyncio.Runner, api: Api, found: FoundRelease, masters: Sequence[Object]) -> Iterator[Path]:
    """Yield a temporary directory with the journal of the release's job, and its summary once it has ended.

    Raises:
        EdlError: the journal is lost, or the body has raised it; the message names the pod, not the copy.
        ApiError: the API refuses, or does not answer.
    """
    where = f"release {found.release}"
    pod = acting(masters, where)
    with tempfile.TemporaryDirectory(prefix="edl-journal-") as folder:
        copy = Path(folder)
        try:
            loop.run(_copy(api, found, pod, copy))
            yield copy
        except EdlError as error:  # its message names files of the copy
            error.args = (str(error).replace(str(copy), f"{where}, pod {pod}: {OUTPUT}"),)
            raise


async def _copy(api: Api, found: FoundRelease, pod: str, copy: Path) -> None:
    """Copy the journal's segments, and the summary if the job has ended.

    Raises:
        EdlError: a file cannot be read, or the journal's head is damaged.
    """
    path = f"/api/v1/namespaces/{found.namespace}/pods/{pod}/exec"
    files = Reading(api, path, MASTER, f"release {found.release}: the journal in pod {pod}")
    if found.ended:
        await _fetch(files, artifacts.SUMMARY, copy)
    head = JournalReader(await _fetch(files, artifacts.JOURNAL, copy))
    for number in range(head.oldest, head.number):
        await _fetch(files, artifacts.segment(copy, number).name, copy)


async def _fetch(files: Reading, name: str, copy: Path) -> Path:
    """Copy one file; return the path of the copy.

    Raises:
        EdlError: the file cannot be read in the pod.
    """
    path = copy / name
    with open(path, "wb") as written:
        try:
            await files.run(["cat", str(OUTPUT / name)], written.write)
        except EdlError as error:
            raise EdlError(
                f"{error}; the pod of the job's last master has it; without a volume, it is lost with it"
            ) from error
    return path


async def _elsewhere(api: Api, found: FoundRelease, copy: Path) -> Elsewhere:
    """Prepare access to the digests of the exported files, and the reasons why other files are not read.

    Raises:
        EdlError: the pod that reads the output volume does not run.
    """
    checkpoints = "they are on the master's volume, or where workers write them (`edl checkpoint verify DIR`)"
    exported = artifacts.read_summary(copy).get("exports")
    if not exported:
        return Elsewhere(_unread, "", checkpoints)
    if not found.model:
        return Elsewhere(_unread, LOST.format("was"), checkpoints)
    if found.model_file.startswith("/"):
        return Elsewhere(_unread, f"the model is at {found.model_file}", checkpoints)
    if ".." in PurePosixPath(found.model_file).parts:  # the path is from a ConfigMap, and written to below
        raise EdlError(
            f"release {found.release}: the status names the model {found.model_file!r}, expected a path "
            "without .. below the output volume"
        )
    digests: dict[str, str | OSError] = {}
    async with mounted(api, found) as (volume, directory):
        try:
            listed = await volume.whole(directory / artifacts.EXPORTS)
        except EdlError:
            listed = b""  # the audit then reports that the list is missing
        else:
            beside = (copy / found.model_file).parent
            beside.mkdir(parents=True, exist_ok=True)
            (beside / artifacts.EXPORTS).write_bytes(listed)
        for name in _names(listed):
            said: list[bytes] = []
            try:
                await volume.run(["sha256sum", str(directory / name)], said.append)
                digests[name] = b"".join(said).decode(errors="replace").lstrip("\\")[:64]
            except EdlError as error:
                digests[name] = OSError(0, str(error))

    def digest(name: str) -> str:
        if isinstance(known := digests.get(name, _missing(name)), OSError):
            raise known
        return known

    return Elsewhere(digest, "", checkpoints)


def _names(listed: bytes) -> list[str]:
    """Paths of the exported files, relative to the list; empty if it is damaged, which fails the audit."""
    try:
        return [name for export in exports.parse(listed).values() for name in export.places]
    except exports.Damaged:
        return []


def _missing(name: str) -> OSError:
    return OSError(0, f"{name} is not in {artifacts.EXPORTS}")


def unread(why: str) -> Elsewhere:
    """No access to exported files and checkpoints, for this reason."""
    return Elsewhere(_unread, why, why)


def _unread(name: str) -> str:
    raise _missing(name)
