# SPDX-License-Identifier: Apache-2.0
"""The names that models which were saved before have for classes of ElasticDL's modules."""

import importlib
import sys

from edl import integrations

_ROOM = integrations.MODELS["elasticdl"].partition(":")[0].rpartition(".")[0]
for _name in ("model", "operations", "preprocessing"):
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"{_ROOM}.{_name}")
