"""`edl replay DIR`: the journal through a new core. It must decide the same and end the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from edl.contract import artifacts
from edl.errors import EdlError
from master import journal
from master.core import view
from master.spec import JobSpec


def main(directory: str) -> int:
    output = Path(directory)
    try:
        head, _ = journal.read(output / artifacts.JOURNAL)
        job = journal.replay(output / artifacts.JOURNAL, JobSpec.parse(head["values"]).config)
        summary = {"run_id": head["run_id"], **view.summary(job)}
        kept = json.loads((output / artifacts.SUMMARY).read_text(encoding="utf-8"))
        kept.pop("foreign_messages", None)  # refused at the door, so the core does not know of them
    except (EdlError, OSError) as error:
        print(f"edl replay: {error}", file=sys.stderr)
        return 1
    differing = [key for key in kept if kept[key] != json.loads(json.dumps(summary)).get(key)]
    if differing:
        print(
            f"edl replay: the end differs from {artifacts.SUMMARY} in {', '.join(differing)}", file=sys.stderr
        )
        return 1
    print(f"the same end: {job.phase}, {job.ring.generation} generations, step {job.step}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
