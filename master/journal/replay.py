# SPDX-License-Identifier: Apache-2.0
"""`edl replay DIR`: feed the journal through a new core, and check that decisions and end are the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from edl.contract import artifacts
from edl.errors import EdlError
from edl.formatting import plain
from edl.master.core import view
from edl.master.journal import journal

# Unknown to the core: messages that the server refuses, and the journal itself.
OUTSIDE = ("foreign_messages", "journal")


def main(directory: str) -> int:
    """Replay the journal in `directory`, and compare the result with the summary. Return the exit code."""
    output = Path(directory)
    try:
        kept = artifacts.read_summary(output)
        run_id, job, oldest = journal.replayed(output, kept)
    except EdlError as error:
        print(f"edl replay: {plain(str(error))}", file=sys.stderr)
        return 1
    try:
        summary = json.loads(json.dumps({"run_id": run_id, **view.summary(job)}))
    except Exception as error:  # an impossible state
        what = plain(f"{type(error).__name__}: {error}".partition("\n")[0])
        print(f"edl replay: the state that the journal leads to is damaged ({what})", file=sys.stderr)
        return 1
    for written in (kept, summary):  # the path is absolute if the output directory was full
        written["model"] = Path(str(written.get("model", ""))).name
    names = [key for key in (*kept, *(summary.keys() - kept.keys())) if key not in OUTSIDE]
    differing = [key for key in names if key not in kept or kept[key] != summary.get(key)]
    if differing:
        keys = plain(", ".join(differing))
        print(f"edl replay: the end differs from {artifacts.SUMMARY} in {keys}", file=sys.stderr)
        return 1
    text = f"the same end: {job.phase}, {job.ring.generation} generations, step {job.latest.step}"
    if oldest is not None:
        text += f"; replayed from the state at the head of {oldest.name}: what came before is not kept"
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
