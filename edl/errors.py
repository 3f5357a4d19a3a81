"""Errors that we say in our own words.

    EdlError
    ├── ConfigError         a value, a values file, or a flag is wrong
    ├── ModelError          a user's model cannot be trained this way
    ├── UserCodeError       the code of a user's model raises, before the first step
    ├── DataError           a record, a file, or a reader is not what it should be
    ├── CheckpointError     checkpoints cannot be written or read
    │   ├── CheckpointDamaged   one of them is not what was written
    │   └── StoreUnavailable    their store does not answer, and may later
    ├── MasterUnavailable   the job's master does not answer
    └── Unauthenticated     the job's master does not accept the token

Each text stands alone: it names the key, the file or the record, and what was expected.
"""


class EdlError(Exception):
    """The root: an error whose text is meant for the user, without a traceback."""


class ConfigError(EdlError):
    """A value, a values file, or a flag is wrong."""


class ModelError(EdlError):
    """A user's model cannot be trained this way."""


class UserCodeError(EdlError):
    """The code of a user's model raises where nothing can go on; its traceback is worth reading."""


class DataError(EdlError):
    """A record, a file, or a reader is not what it should be."""


class CheckpointError(EdlError):
    """Checkpoints cannot be written or read."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint is not what was written: torn, truncated, altered or half-uploaded."""


class StoreUnavailable(CheckpointError):
    """A store of checkpoints does not answer, or has too much to do: it may later."""


class MasterUnavailable(EdlError):
    """The job's master does not answer."""


class Unauthenticated(EdlError):
    """The job's master does not accept the token."""
