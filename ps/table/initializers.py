"""What an id's row holds before the first step that has the id: of Keras' initializers, by their JSON.

A row's values depend on the job's seed, the table's name and the id (and on the initializer's own seed, if
the user has given it one): on no order, and not on the number of servers.

Keras draws a whole matrix [input_dim, dim]. Here is no `input_dim`: ids are any 64-bit numbers. What scales
with it (`fan_in`, and the `fan_avg` of Glorot's) is refused, instead of being something else than its name
says; `fan_out` is `dim`, as in Keras.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edl.ps.errors import Invalid
from edl.ps.table import kernels

# Of a normal distribution that is cut at two standard deviations, its own standard deviation; as Keras has
# it.
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
    """Args: as `native.pull` takes them; and the seed that the user gave to it alone."""

    kind: int
    a: float
    b: float = 0.0
    seed: int | None = None


def parse(text: str, table: str, dim: int) -> Initializer:
    """
    Args:
        text: as `keras.initializers.serialize` has it, in JSON.

    Raises:
        Invalid: it is not one that a server knows.
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
        Invalid: it is none.
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
