# SPDX-License-Identifier: Apache-2.0
"""Write the report of a job as a file. As a program: that of an ended job, into its output directory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl.contract import artifacts
from edl.errors import EdlError
from edl.journal.audit import Elsewhere, audit
from edl.report import reading
from edl.report.timeline import Timeline

MAX_AUDITED = 16 << 20  # bytes of a journal; a larger one is not audited for a report


class NoPlots(EdlError):
    """Matplotlib is not installed."""


def html(output: Path, told: Mapping[str, Any], name: str = "", elsewhere: Elsewhere | None = None) -> str:
    """Return the report of the job in `output` as an HTML page.

    Args:
        told: the summary of the job, or its status while it runs; {} if neither is known.
        name: the job's name for people; empty: that of the directory.
        elsewhere: as in `audit`.

    Raises:
        NoPlots: Matplotlib is not installed.
        EdlError: the journal cannot be read, or is damaged.
    """
    timeline = reading.read(output)
    _pictures()
    from edl.report.page import page

    values = timeline.values.get("model", {})
    model = values.get("script") or values.get("module") or "model"
    title = f"{Path(str(model)).name} ({name or output.resolve().name})"
    return page(timeline, told, verdict(output, elsewhere), title)


def sections(timeline: Timeline, told: Mapping[str, Any], live: bool = False) -> str:
    """Return the pictures and tables of a job's report as HTML.

    Args:
        told: as in `html`.
        live: only those that the live page shows while the job runs.

    Raises:
        NoPlots: Matplotlib is not installed.
    """
    _pictures()
    from edl.report import page

    return page.sections(timeline, told, live)


def picture(output: Path, name: str, kind: str, told: Mapping[str, Any]) -> bytes:
    """Return one picture of the report as a file.

    Args:
        name: one of `PICTURES`.
        kind: svg or png.
        told: as in `html`.

    Raises:
        NoPlots: Matplotlib is not installed.
        EdlError: the journal cannot be read or is damaged, or the job has nothing to show in this picture.
    """
    timeline, pictures = reading.read(output), _pictures()
    from edl.report.svg import written

    with pictures.styled():
        if name == "goodput":
            figure = pictures.goodput(told.get("goodput_seconds") or told.get("goodput") or {})
        else:
            figure = getattr(pictures, name)(timeline)
        if figure is None:
            raise EdlError(f"{output}: the job has nothing to show in the picture {name!r}")
        return written(figure, kind)


def main(output: Path) -> None:
    """Write the report of an ended job into its output directory.

    Raises:
        EdlError: as `html`.
        OSError: the file cannot be written.
    """
    artifacts.write_whole(output / artifacts.REPORT, html(output, artifacts.read_summary(output)))


def _pictures() -> Any:
    """Import the module that draws.

    Raises:
        NoPlots: Matplotlib is not installed.
    """
    try:
        from edl.report import pictures  # imported late: Matplotlib is optional, and takes a second
    except ImportError as error:
        raise NoPlots(
            f"a report needs Matplotlib ({error}); install it with: pip install matplotlib"
        ) from error
    return pictures


def verdict(output: Path, elsewhere: Elsewhere | None = None) -> str:
    """Return the sentence of the audit, or why the audit was not made."""
    size = sum(path.stat().st_size for path in artifacts.journals(output))
    if size > MAX_AUDITED:
        return f"not made here, because the journal has {size / 1e6:.0f} MB; to make it: edl audit {output}"
    try:
        return audit(output, elsewhere)
    except EdlError as error:
        return f"FAILED: {error}"


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (EdlError, OSError) as error:
        print(f"edl: {error}", file=sys.stderr)
        sys.exit(1)
