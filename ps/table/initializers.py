# SPDX-License-Identifier: Apache-2.0
"""Initial rows of ids, before the first step that has the id: Keras' initializers, from their JSON.

A row's values depend on the job's seed, the table's name and the id (and on the initializer's own seed, if
the user has set one). They depend on no order, and not on the number of servers.

Keras draws a whole matrix [input_dim, dim]. Tables have no `input_dim`: ids are any 64-bit numbers.
Initializers that scale with it (`fan_in`, and the `fan_avg` of Glorot's) are refused, because their result
would not be what their name says; `fan_out` is `dim`, as in Keras.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edl.ps.errors import Invalid
from edl.ps.table import kernels

# The standard deviation of a standard normal distribution truncated at two standard deviations, as in Keras.
TRUNCATED_STDDEV = 0.87962566103423978
_SCALED = {
    "GlorotUniform": (1.0, "fan_avg", "uniform"),
    "GlorotNormal": (1.0, "fan_avg", "truncated_normal"),
    "HeUniform": (2.0, "fan_in", "uniform"),
    "HeNormal": (2.0, "fan_in", "truncated_normal"),
    "LecunUniform": (1.0, "fan_in", "uniform"),
    "LecunNormal": (1.0, "fan_in", "truncated_normal"),
}
_KINDS = {
    "uniform": kernels.UNIFORM,
    "untruncated_normal": kernels.NORMAL,
    "truncated_normal": kernels.TRUNCATED,
}


@dataclass(frozen=True)
class Initializer:
    """The fields `kind`, `a` and `b` of `kernels.NewRow`, and the seed, if the user set one for it."""

    kind: int
    a: float
    b: float = 0.0
    seed: int | None = None


def parse(text: str, table: str, dim: int) -> Initializer:
    """Parse a serialized Keras initializer.

    Args:
        text: the result of `keras.initializers.serialize`, in JSON.

    Raises:
        Invalid: servers do not support this initializer.
    """
    name, config = serialized(text, f"table {table!r}: initializer")
    try:
        found = _parse(name, config, dim)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise Invalid(f"table {table!r}: initializer {name}: {type(error).__name__}: {error}") from error
    if found is None or not (math.isfinite(found.a) and math.isfinite(found.b)):
        raise Invalid(
            f"table {table!r}: the initializer {name} {json.dumps(config)} is not one for rows on parameter "
            "servers: expected Zeros, Ones, Constant, RandomUniform, RandomNormal, TruncatedNormal or "
            "VarianceScaling(mode='fan_out'). What scales with the number of ids (fan_in, fan_avg, so "
            "Glorot's, He's and Lecun's) has none here: give the layer its input_dim, or the scale itself: "
            "RandomUniform(-0.05, 0.05)"
        )
    return found


def _parse(name: str, config: Mapping[str, Any], dim: int) -> Initializer | None:
    seed = config.get("seed")
    if isinstance(seed, Mapping):  # a SeedGenerator
        seed = seed.get("config", {}).get("seed")
    seed = int(seed) if seed is not None else None
    match name:
        case "Zeros":
            return Initializer(kernels.ZEROS, 0.0)
        case "Ones":
            return Initializer(kernels.ONES, 1.0)
        case "Constant":
            return Initializer(kernels.CONSTANT, float(config["value"]))
        case "RandomUniform":
            low, high = float(config["minval"]), float(config["maxval"])
            return Initializer(kernels.UNIFORM, low, high, seed)
        case "RandomNormal" | "TruncatedNormal":
            kind = kernels.NORMAL if name == "RandomNormal" else kernels.TRUNCATED
            return Initializer(kind, float(config["mean"]), float(config["stddev"]), seed)
        case "VarianceScaling":
            scale, mode, distribution = float(config["scale"]), config["mode"], config["distribution"]
        case _:
            scale, mode, distribution = _SCALED.get(name, (0.0, "", ""))
    if mode != "fan_out" or distribution not in _KINDS:
        return None
    variance = scale / max(1.0, dim)
    if distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return Initializer(kernels.UNIFORM, -limit, limit, seed)
    stddev = math.sqrt(variance)
    if distribution == "truncated_normal":
        stddev /= TRUNCATED_STDDEV
    return Initializer(_KINDS[distribution], 0.0, stddev, seed)


def serialized(text: str, what: str) -> tuple[str, Mapping[str, Any]]:
    """The class and the configuration of a Keras object, from its JSON.

    Raises:
        Invalid: the text is not the JSON of a Keras object.
    """
    try:
        found = json.loads(text)
        if isinstance(found, str):
            return found, {}
        name, config = found["class_name"], found.get("config") or {}
        if isinstance(name, str) and isinstance(config, Mapping):
            return name, config
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise Invalid(f"{what}: expected the JSON of a serialized Keras object, not {text[:200]!r}")
