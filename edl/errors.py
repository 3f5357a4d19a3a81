# SPDX-License-Identifier: Apache-2.0
"""Errors whose messages are written for users.

    EdlError
    ├── ConfigError         a value, a values file, or a flag is wrong
    ├── ModelError          a user's model cannot be trained this way
    ├── UserCodeError       the code of a user's model raises, before the first step
    ├── DataError           a record, a file, or a reader is invalid
    ├── CheckpointError     checkpoints cannot be written or read
    │   ├── CheckpointDamaged   a checkpoint differs from what was written
    │   │   └── CheckpointRemoved   it was removed while it was read
    │   └── StoreUnavailable    their store does not answer now, but may later
    ├── MasterUnavailable   the job's master does not answer
    └── Unauthenticated     the job's master does not accept the token

Each message stands alone: it names the key, the file or the record, and what was expected.
"""


class EdlError(Exception):
    """The base class: an error whose message is shown to the user without a traceback."""


class ConfigError(EdlError):
    """A value, a values file, or a flag is wrong."""


class ModelError(EdlError):
    """A user's model cannot be trained this way."""


class UserCodeError(EdlError):
    """The code of a user's model raises where the job cannot continue; its traceback is shown."""


class DataError(EdlError):
    """A record, a file, or a reader is invalid."""


class CheckpointError(EdlError):
    """Checkpoints cannot be written or read."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint differs from what was written: it is torn, truncated, altered or half-uploaded."""


class CheckpointRemoved(CheckpointDamaged):
    """A checkpoint was removed, or set aside, while it was read."""


class StoreUnavailable(CheckpointError):
    """A store of checkpoints does not answer, or is overloaded; a later attempt may succeed."""


class MasterUnavailable(EdlError):
    """The job's master does not answer."""


class Unauthenticated(EdlError):
    """The job's master does not accept the token."""
