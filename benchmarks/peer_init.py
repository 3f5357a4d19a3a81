# SPDX-License-Identifier: Apache-2.0
"""How long hvd.init takes on n ranks with Horovod's own rendezvous server. Prints the slowest rank's seconds.

python peer_init.py N          the parent: the server, and N ranks
python peer_init.py N RANK PORT
"""

import os
import subprocess
import sys
import time


def parent(n: int) -> None:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts(",".join(f"h{i}:1" for i in range(n))), n))
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(n), str(i), str(port)], stdin=-1, stdout=-1, text=True
        )
        for i in range(n)
    ]
    for rank in ranks:
        rank.stdout.readline()
    for rank in ranks:
        rank.stdin.write("go\n")
        rank.stdin.flush()
    print(max(float(rank.stdout.readline()) for rank in ranks))
    for rank in ranks:
        rank.kill()
    os._exit(0)


def one(n: int, rank: int, port: int) -> None:
    os.environ.update(
        HOROVOD_RANK=str(rank),
        HOROVOD_SIZE=str(n),
        HOROVOD_LOCAL_RANK="0",
        HOROVOD_LOCAL_SIZE="1",
        HOROVOD_CROSS_RANK=str(rank),
        HOROVOD_CROSS_SIZE=str(n),
        HOROVOD_HOSTNAME=f"h{rank}",
        HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1",
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_IFACE="lo",
        HOROVOD_GLOO_TIMEOUT_SECONDS="120",
        TF_CPP_MIN_LOG_LEVEL="3",
    )
    import horovod.tensorflow as hvd

    print("here", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    hvd.init()
    print(time.monotonic() - began, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    parent(int(sys.argv[1])) if len(sys.argv) == 2 else one(*map(int, sys.argv[1:4]))
