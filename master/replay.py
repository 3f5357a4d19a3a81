"""`edl replay DIR`: the journal through a new core. It must decide the same and end the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from edl.contract import artifacts
from edl.errors import EdlError
from edl.text import plain
from master import journal
from master.core import view

# What the core does not know of: messages that are refused at the door, and the journal itself.
OUTSIDE = ("foreign_messages", "journal")


def main(directory: str) -> int:
    output = Path(directory)
    try:
        kept = artifacts.read_summary(output)
        run_id, job = journal.replayed(output, kept)
    except EdlError as error:
        print(f"edl replay: {plain(str(error))}", file=sys.stderr)
        return 1
    summary = json.loads(json.dumps({"run_id": run_id, **view.summary(job)}))
    differing = [key for key in kept if key not in OUTSIDE and kept[key] != summary.get(key)]
    if differing:
        keys = plain(", ".join(differing))
        print(f"edl replay: the end differs from {artifacts.SUMMARY} in {keys}", file=sys.stderr)
        return 1
    print(f"the same end: {job.phase}, {job.ring.generation} generations, step {job.step}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
