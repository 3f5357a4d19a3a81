# SPDX-License-Identifier: Apache-2.0
"""The files of a job's output directory: their names, and how they are written.

summary.json   how the job ended and what elasticity cost
events.jsonl   the journal: every event, every decision (events.1.jsonl ...: its earlier segments)
model.keras    the trained model (model.weights.npz: its variables, when it cannot be saved whole)
model.onnx     an export for other programs (see export.formats); also the directory model.savedmodel
exports.json   size and SHA-256 of each export, and whether it was loaded again
checkpoints/   the newest checkpoints, unless checkpoint.dir is elsewhere
predictions    a directory: the predictions of a job with mode=predict (trainer/evaluation/prediction.py)
history.json   loss and metrics of each epoch, as Keras' `fit` returns them (history.csv: a line each)
report.html    pictures of the job (edl report), written at its end
logs/          of the master and of each worker
servers/       of the parameter servers, while the job runs: the log and the address of each
master.json    address and token of the running master (readable by the owner only)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edl.errors import EdlError
from edl.scratch import unfinished

SUMMARY, JOURNAL, MODEL, LOGS, CONTACT = "summary.json", "events.jsonl", "model.keras", "logs", "master.json"
LOCK, SERVERS, CHECKPOINTS = ".lock", "servers", "checkpoints"
REPORT = "report.html"
SAVING = ".saving-"  # prefix of the directories in which a script saves, until its files are complete
EXPORTS = "exports.json"
# Export formats: the name in the values, and the file or directory.
FORMATS = {"keras": MODEL, "savedmodel": "model.savedmodel", "onnx": "model.onnx"}
PREDICTIONS = "predictions"
HISTORY, HISTORY_TABLE = "history.json", "history.csv"
# In a .keras file: Keras' member about the file, and the names of the labels' classes by number in it. A
# checkpoint's state has these names under the same key.
METADATA, CLASSES = "metadata.json", "classes"
VARIABLES = "model.weights.npz"  # when the model cannot be saved whole

# Format of the journal's lines. 3: a chain of hashes (edl.journal.format); 4: steps, no leases; 5: segments,
# no heartbeats; 8: digests of the members' states; 10: `rolled_back` and `callbacks_done`;
# 11: the state of the ring; 12: `assigned` in the state of the servers
JOURNAL_VERSION = 14
MAX_BYTES = 64 << 20  # of a file that is read whole, and of a line of the journal; a job writes far less
_SEGMENT = re.compile(r"events\.([0-9]{1,9})\.jsonl")


@dataclass(frozen=True)
class Contact:
    """Address and credentials of a job's master.

    Args:
        ca: path of the CA certificate that its certificate is verified against; empty: no TLS.
    """

    address: str
    token: str
    pid: int
    ca: str = ""


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace the file atomically: a reader sees the old text or the new one, never a part.

    The text is written as UTF-8. Bytes of a path that are not UTF-8 are restored (PEP 383).

    Raises:
        OSError: the file cannot be written; the old text stays.
    """
    with unfinished(path) as written:
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def lock(output: Path) -> int:
    """Lock the directory for one job. Closing the returned descriptor in all processes releases the lock.

    Raises:
        EdlError: another job runs in this directory.
        OSError: the directory cannot be written.
    """
    descriptor = os.open(output / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise EdlError(f"{output}: another job runs in this directory; choose another --output") from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def journals(output: Path) -> list[Path]:
    """The existing segments of a job's journal, in order; the last is events.jsonl."""
    earlier = [path for path in output.glob("events.*.jsonl") if _SEGMENT.fullmatch(path.name)]
    return [*sorted(earlier, key=number_of), *(path for path in [output / JOURNAL] if path.exists())]


def written(output: Path) -> list[Path]:
    """The existing files and directories that a job has written in its output directory."""
    names = {SUMMARY, LOGS, CONTACT, LOCK, SERVERS, EXPORTS, PREDICTIONS, HISTORY, HISTORY_TABLE, REPORT}
    names |= {CHECKPOINTS, ".run", VARIABLES, *FORMATS.values()}
    return [*journals(output), *(path for path in output.iterdir() if path.name in names)]


def segment(output: Path, number: int) -> Path:
    """The file of an earlier segment of the journal; the last segment is in events.jsonl."""
    return output / f"events.{number}.jsonl"


def number_of(path: Path) -> int:
    """The number of a segment, from the name of its file."""
    found = _SEGMENT.fullmatch(path.name)
    assert found is not None, path
    return int(found[1])


def has_ended(output: Path) -> bool:
    """Whether the job in `output` has written its summary.

    Raises:
        EdlError: the directory cannot be read.
    """
    try:
        return (output / SUMMARY).exists()
    except OSError as error:
        raise EdlError(f"{output}: {error.strerror}") from error


def read_whole(path: Path) -> bytes:
    """Read a small file of a job.

    Raises:
        OSError: it cannot be read, or it is larger than a job writes it.
    """
    with open(path, "rb") as file:
        found = file.read(MAX_BYTES + 1)
    if len(found) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MAX_BYTES >> 20} MiB, which no job writes")
    return found


def read_summary(output: Path) -> dict[str, Any]:
    """Read the summary of the job in `output`.

    Raises:
        EdlError: the summary does not exist, because the job has not ended or `output` is not a job's
            directory; or the summary is damaged.
    """
    path = output / SUMMARY
    try:
        summary = json.loads(read_whole(path))
    except OSError as error:
        raise EdlError(f"{path}: cannot read: {error.strerror} (has the job ended?)") from error
    except (ValueError, RecursionError) as error:
        raise EdlError(f"{path}: not JSON") from error
    if not isinstance(summary, dict):
        raise EdlError(f"{path}: not a map")
    return summary


def write_contact(output: Path, contact: Contact) -> None:
    """Write how the master is reached, with the job's token: only this account may read the file."""
    write_whole(output / CONTACT, json.dumps(asdict(contact)) + "\n", mode=0o600)


def read_contact(output: Path) -> Contact:
    """Read the address and token of the master of the job in `output`.

    Raises:
        EdlError: `output` is not a job's output directory.
    """
    try:
        return Contact(**json.loads(read_whole(output / CONTACT)))
    except (OSError, ValueError, TypeError) as error:
        raise EdlError(f"{output}: not the output directory of a job ({CONTACT} not found)") from error
