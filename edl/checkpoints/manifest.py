# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: one JSON text, written last.

Promise: each manifest has exactly one text (sorted keys, no spaces, ASCII). It contains its own SHA-256, so
that a single altered bit is detected. The names in it are names of files beside it, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from edl.errors import CheckpointDamaged, CheckpointError

VERSION = 1
FILE = "manifest.json"
MAX_BYTES = 64 << 20  # greatest size of a manifest; a million variables fit
SUM = "sha256"
SERVERS = "servers"  # key in `state`: {"count": n, "parts": [names]}, the parts of parameter servers
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,119}")  # a file or an attempt: no path, no hidden file
Number = Annotated[float, Field(strict=False)]  # also "nan" and "inf", which are not numbers in JSON
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Variable:
    """One tensor of the state.

    Args:
        name: its key in the file; unique in a checkpoint.
        dtype: its name in NumPy and TensorFlow.
        part: the index of the part that holds it.
    """

    __pydantic_config__ = _STRICT

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: int


@dataclass(frozen=True)
class CheckpointFile:
    """One file of tensors, as described by its writer."""

    __pydantic_config__ = _STRICT

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The state of a training beside its tensors.

    Args:
        step: number of steps that are in the tensors.
        run: id of the run that the state belongs to.
        attempt: id of the attempt at this checkpoint.
        epoch: epoch of the next step, from 0.
        records: number of records that were trained on, over all epochs.
        model: fingerprint of the model.
        created: time in UTC, in the format of `utc_now`.
        edl: version of edl that wrote it.
        skipped: ranges of steps that are not in the tensors (their gradients were not finite).
        bad: number of omitted records by epoch.
        config: values that must not change, by key.
        state: other JSON data, such as the state of callbacks.
        parts: the parts, in the order of their indices.
    """

    __pydantic_config__ = _STRICT

    step: int
    run: str
    attempt: str
    epoch: int
    records: int
    model: str
    variables: tuple[Variable, ...]
    parts: tuple[CheckpointFile, ...]
    skipped: tuple[tuple[int, int], ...] = ()
    bad: dict[int, int] = field(default_factory=dict)
    metrics: dict[str, Number] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    created: str = ""
    edl: str = ""
    version: int = VERSION

    @property
    def nbytes(self) -> int:
        """Total size of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def of_servers(self) -> frozenset[str]:
        """Names of the parts that parameter servers have written: these hold rows and no variables."""
        return frozenset(self.state[SERVERS]["parts"]) if SERVERS in self.state else frozenset()


def utc_now() -> str:
    """The current time in the format of `Manifest.created`."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest as its one text.

    Raises:
        ValueError: the manifest is invalid: something in it is not JSON, or contradicts itself.
    """
    text = _canonical(_MANIFEST.dump_python(manifest, mode="json", warnings="error"))
    normal = _MANIFEST.validate_json(text)  # turns ints in float fields into floats
    if wrong := _contradiction(normal):
        raise ValueError(wrong)
    body = _MANIFEST.dump_python(normal, mode="json")
    return _canonical({**body, SUM: _sum(body)})


def decode(raw: bytes) -> Manifest:
    """Decode a text of `encode`.

    Raises:
        CheckpointDamaged: any bit of the text was altered.
        CheckpointError: a newer edl has written the text.
    """
    try:
        body = json.loads(raw.decode("ascii"))
        # True in every version: a checkpoint of a newer edl is reported as such, and not skipped as damaged.
        intact = body.pop(SUM) == _sum(body) and _canonical({**body, SUM: _sum(body)}) == raw
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
        raise CheckpointDamaged(f"{FILE} is damaged: {type(error).__name__}: {error}") from error
    if not intact:
        raise CheckpointDamaged(f"{FILE} is damaged: its SHA-256 is not the one that it holds")
    if isinstance(version := body.get("version"), int) and version > VERSION:
        raise CheckpointError(
            f"{FILE} has version {version}, this edl knows versions up to {VERSION}: use a newer edl"
        )
    try:
        manifest = _MANIFEST.validate_json(_canonical(body))
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointDamaged(f"{FILE}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if wrong := _contradiction(manifest):
        raise CheckpointDamaged(f"{FILE}: {wrong}")
    return manifest


def same_state(one: Manifest, other: Manifest) -> bool:
    """Whether both describe the same tensors; the process and the time of writing may differ."""
    return replace(one, created="", edl="") == replace(other, created="", edl="")


def _contradiction(manifest: Manifest) -> str:
    names = [part.name for part in manifest.parts]
    if bad := [name for name in [*names, manifest.attempt] if not NAME.fullmatch(name) or name == FILE]:
        return f"{bad[0]!r} is not the name of a file in the checkpoint's directory"
    if len(set(names)) != len(names):
        return "two parts have the same name"
    if len({variable.name for variable in manifest.variables}) != len(manifest.variables):
        return "two variables have the same name"
    if wrong := _contradiction_of_servers(manifest):
        return wrong
    for variable in manifest.variables:
        if not 0 <= variable.part < len(names):
            return f"variable {variable.name!r} is in part {variable.part}, there are {len(names)} parts"
        if min(variable.shape, default=0) < 0:
            return f"variable {variable.name!r} has the shape {variable.shape}"
    for part in manifest.parts:
        if not re.fullmatch("[0-9a-f]{64}", part.sha256) or part.nbytes < 0:
            return f"part {part.name!r} has no size or no SHA-256"
    return "" if min(manifest.step, manifest.epoch, manifest.records) >= 0 else "a count is negative"


def _contradiction_of_servers(manifest: Manifest) -> str:
    if SERVERS not in manifest.state:
        return ""
    said = manifest.state[SERVERS]
    listed = said.get("parts") if isinstance(said, dict) else None
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        return f"state.{SERVERS} does not name the parts of parameter servers"
    if said.get("count") != len(listed) or len(set(listed)) != len(listed):
        return f"state.{SERVERS} names {len(listed)} parts of {said.get('count')} parameter servers"
    if unknown := sorted(set(listed) - {part.name for part in manifest.parts}):
        return f"{unknown[0]!r} of a parameter server is not one of the parts"
    holding = {manifest.parts[v.part].name for v in manifest.variables if 0 <= v.part < len(manifest.parts)}
    if both := sorted(set(listed) & holding):
        return f"{both[0]!r} is of a parameter server, and is to hold a variable"
    return ""


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(_finite(body), sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _finite(value: Any) -> Any:
    """Replace numbers that JSON lacks by texts that `float` reads."""
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _sum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


_MANIFEST = TypeAdapter(Manifest)
