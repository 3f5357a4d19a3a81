# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the state of a training, stored where it outlives all processes of the job.

    store = Store.open("s3://bucket/prefix")          # or a directory

    writing = store.begin(step, attempt)              # every rank by itself, with the same attempt
    part = writing.write_part(index, of, tensors)     # every rank, in its own process
    writing.commit(Manifest(..., parts=parts))        # one process, when all parts are known

    found = store.load_newest(warn=print)             # the newest whole one, verified while it is read

Promise: a checkpoint is complete or does not count. The data read are, bit for bit, the data written. Torn,
truncated, altered or half-uploaded checkpoints are skipped with a warning. A checkpoint is data, never code.
"""

from edl.checkpoints.checkpoint import Checkpoint
from edl.checkpoints.manifest import SERVERS, VERSION, CheckpointFile, Manifest, Variable, utc_now
from edl.checkpoints.resumed import check_values
from edl.checkpoints.store import Best, Loaded, Store, Writing, one_of
from edl.checkpoints.tensors import Tensor
from edl.errors import CheckpointDamaged, CheckpointError

__all__ = [
    "SERVERS",
    "VERSION",
    "Best",
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointFile",
    "Loaded",
    "Manifest",
    "Store",
    "Tensor",
    "Variable",
    "Writing",
    "check_values",
    "one_of",
    "utc_now",
]
