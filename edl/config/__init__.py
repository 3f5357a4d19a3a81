"""The configuration of a job: typed values, values files and flags, and messages about mistakes in them.

job          the job's values: types, limits, what may change while a job runs
chart        the values that shape the chart's objects
values       values files and `--set`, merged as Helm merges them
model_check  a user's model that comes as one file
"""

from edl.config.job import (
    IN_POD,
    JOB,
    Config,
    Data,
    Elastic,
    File,
    Local,
    Model,
    Training,
    flat,
    frozen_changes,
    impossible,
    live_keys,
    of_job,
    parse,
    unscalable,
    unscalable_servers,
    with_keys_of,
)

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
