# SPDX-License-Identifier: Apache-2.0
"""The configuration of a job: typed values, values files and flags, and messages about mistakes in them.

job          the job's values: their types and limits
rules        invalid combinations of values that are valid by themselves
changes      what may change while a job runs
chart        the values that shape the chart's objects
values       values files and `--set`, merged as Helm merges them
model_check  a user's model that comes as one file
"""

from edl.config.changes import (
    IN_POD,
    frozen_changes,
    live_keys,
    unscalable,
    unscalable_servers,
    with_keys_of,
)
from edl.config.job import JOB, Config, Data, Elastic, File, Local, Model, Training, flat, of_job, parse
from edl.config.rules import impossible

__all__ = [
    "IN_POD",
    "JOB",
    "Config",
    "Data",
    "Elastic",
    "File",
    "Local",
    "Model",
    "Training",
    "flat",
    "frozen_changes",
    "impossible",
    "live_keys",
    "of_job",
    "parse",
    "unscalable",
    "unscalable_servers",
    "with_keys_of",
]
