# SPDX-License-Identifier: Apache-2.0
"""The source of a job's batches: a thread of the worker, or reader processes (data.workers)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from edl.config import Config
from edl.data import RandomAccess, Reader
from edl.data.place import place
from edl.data.same import digest_of_reader
from edl.trainer.model.user_model import UserModel
from edl.trainer.records import fork_server
from edl.trainer.records.batches import ParallelSource, Source
from edl.trainer.records.parallel_records import ParallelRecords
from edl.trainer.records.processes import ForkServer
from edl.trainer.records.records import Records
from edl.trainer.records.workers import own_cores, reader_count
from edl.trainer.runtime.watchdog import STARTUP_TIMEOUT, Doing

READERS_LOG = logging.getLogger("edl.data")
RECORDS_SERVICE = "edl.trainer.model.records_service:RecordsService"


def source_of(
    config: Config,
    module: UserModel,
    reader: Reader,
    records: Records,
    warn: Callable[[str], None],
    split: str = "train",
) -> Source:
    """Return the source of a job's batches: reader processes, or `records`.

    The processes import their libraries while this worker builds and warms up its model. Only the records of
    the training are shuffled, and only they may be bad.

    Args:
        reader: the records of the split, which `records` reads.
        warn: takes a line when a reader process has died, or when a store of files does not answer.
    """
    show_warnings(warn)
    sharing = config.workers if config.local.threads else 1
    count = reader_count(config.data.workers, reader, own_cores(max(sharing, 1)))
    if not count or not records.layout.records:
        fork_server.drop_prepared()
        return records
    trains, seed = split == "train", config.training.seed
    lenient, shuffle = trains and config.data.max_bad_records > 0, trains and config.data.shuffle
    spec = {
        "module": config.model.module,
        "source": config.model.source,
        "functions": config.model.functions,
        "data": config.data.model_dump(by_alias=True),
        "split": split,
        "seed": seed,
        "shuffle": shuffle,
        "lenient": lenient,
        "count": records.layout.records,
        "classes": module.labels.classes,
        "digest": digest_of_reader(reader),
    }
    return ParallelRecords(
        ForkServer(
            RECORDS_SERVICE, spec, config.elastic.startup_timeout_seconds, STARTUP_TIMEOUT, prepared=True
        ),
        count,
        records.layout,
        seed,
        shuffle,
        random_access=isinstance(reader, RandomAccess),
        lenient=lenient,
        name=module.name,
        seconds=config.elastic.step_timeout_seconds,
        warn=warn,
        place=partial(place, reader),
    )


def wait_for_readers(name: str, source: Source, doing: Doing) -> None:
    """Return when each reader process is up, and has read: this worker's first step waits for none then.

    Args:
        name: the user's module, for messages.
        doing: names this stage of the start.

    Raises:
        DataError: a process cannot be started, or cannot open the data.
        Exception: raised by the user's code there.
    """
    if isinstance(source, ParallelSource):
        doing.now(f"{name}: the start of the reader processes (data.workers)")
        source.idle().result()


class _Warnings(logging.Handler):
    """Passes warnings of the log on to the job's status."""

    def __init__(self, warn: Callable[[str], None]):
        super().__init__(logging.WARNING)
        self._warn = warn

    def emit(self, record: logging.LogRecord) -> None:
        self._warn(record.getMessage())


def show_warnings(warn: Callable[[str], None]) -> None:
    """Show warnings about files of data in the job's status, such as a store that does not answer."""
    for handler in READERS_LOG.handlers:
        if isinstance(handler, _Warnings):
            READERS_LOG.removeHandler(handler)
    READERS_LOG.addHandler(_Warnings(warn))
