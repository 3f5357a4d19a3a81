"""`edl master`: where the master's process begins.

Exit codes: 0 Succeeded; 1 the job ended otherwise; 2 it could not be started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from edl.errors import EdlError
from master import failover
from master.log import log_at
from master.loop import Master


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="edl master", description=__doc__)
    parser.add_argument("--values", type=Path, help="the job's merged values, as JSON")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument(
        "--metrics", default="0.0.0.0:8501", metavar="HOST:PORT", help="of --backend kubernetes"
    )
    parser.add_argument("--backend", choices=("processes", "external", "kubernetes"), default="processes")
    args = parser.parse_args(argv)
    try:
        if args.backend == "kubernetes":
            from master.in_cluster import Release  # not needed, and not there, where no cluster is

            log_at("info")
            return asyncio.run(Release(args.output, args.listen, args.metrics).run())
        if args.values is None:
            parser.error("--values is needed")
        values = json.loads(args.values.read_text(encoding="utf-8"))
        log_at(values.get("logLevel", "info"))
        inherited = failover.inherited(args.output, values) if args.backend == "external" else None
        master = Master(values, args.output, args.listen, args.backend, inherited=inherited)
        return asyncio.run(master.run())
    except (EdlError, OSError, RuntimeError) as error:
        print(f"edl master: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
