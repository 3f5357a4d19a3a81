# SPDX-License-Identifier: Apache-2.0
"""Records of a Python file or of files, written to one ArrayRecord file: `edl data convert`.

python -P -m edl.trainer.programs.convert_data < REQUEST
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edl.contract.workers import remove_leftovers
from edl.data import open_files
from edl.data.conversion import Converted, Elements, check_target, convert
from edl.errors import DataError, EdlError
from edl.formatting import how_many
from edl.trainer.model import user_import
from edl.trainer.records.splits import takes_split
from edl.trainer.runtime.error_report import format_error


@dataclass(frozen=True)
class Request:
    """A conversion that is asked for.

    Args:
        source: a Python file with data(split) or data(), or the address of files.
        target: the file to write.
        split: the split that data() is asked for.
        elements: see `convert`; empty for the default.
        format, options: of the source's files, as for `open_files`.
        replace: overwrite an existing file.
    """

    source: str
    target: str
    split: str
    elements: str
    format: str
    options: dict[str, Any]
    replace: bool


def main() -> int:
    """Run the request on standard input. Return the exit code."""
    remove_leftovers(os.environ)
    request = Request(**json.load(sys.stdin))
    try:
        began = time.monotonic()
        target = Path(request.target)
        check_target(target, request.replace)
        data, source = _opened(request)
        elements: Elements | None = (
            "batches" if request.elements == "batches" else "records" if request.elements else None
        )
        print(_described(convert(data, target, source, elements, request.replace, _report), began))
    except EdlError as error:
        print(f"edl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # of the user's data
        print(f"edl: {request.source}: {format_error(error)}", file=sys.stderr)
        return 1
    return 0


def _opened(request: Request) -> tuple[Any, str]:
    """The data of the request, and their name.

    Raises:
        DataError: the file has no data(), or files cannot be opened.
    """
    if not request.source.endswith(".py"):
        return open_files(request.source, request.format or None, **request.options), request.source
    function = getattr(user_import.import_file(Path(request.source)), "data", None)
    if not callable(function):
        raise DataError(f"{request.source}: the file has no function data(split) or data()")
    if takes_split(function, request.source):
        return function(request.split), f"{request.source}: data({request.split!r})"
    return function(), f"{request.source}: data()"


def _report(records: int) -> None:
    print(f"{how_many(records, 'record')} so far", file=sys.stderr, flush=True)


def _described(found: Converted, began: float) -> str:
    seconds = time.monotonic() - began
    size = f"{found.bytes / (1 << 20):,.1f} MiB, {seconds:.1f} s"
    head = f"{found.path}: {how_many(found.records, 'record')}, {size}"
    rows = [f"  {name}: {kind} {list(shape)}" for name, (kind, shape) in found.columns.items()]
    return "\n".join([head, *rows, f'read it with edl.arrayrecord("{found.path}")'])


if __name__ == "__main__":
    sys.exit(main())
