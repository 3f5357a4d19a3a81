# SPDX-License-Identifier: Apache-2.0
"""Measure sums by themselves, between ranks on this machine.

sums.py RANKS
"""

import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time

SIZES = ((10, 300), (100_000, 200), (25_000_000, 12))  # elements, and how often they are summed


def rank(number: int, ranks: int, port: int) -> None:
    """Sum on the GPU if there is one; rank 0 prints the seconds."""
    import tensorflow as tf

    from edl.trainer.model.graphs import concrete
    from edl.trainer.ring.horovod import HorovodRing

    ring = HorovodRing(port, "lo", f"rank-{number}", store_secret=os.environ["SUMS_SECRET"])
    began = time.time()
    ring.form(number, ranks)
    parts = [f"formed {time.time() - began:.3f} s"]
    device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
    with tf.device(device):
        for size, times in SIZES:
            name = f"sum-of-{size}"
            graph = concrete(
                lambda x, name=name: ring.in_graph(x * 1.0, name), tf.TensorSpec([size], tf.float32)
            )
            x, seconds = tf.ones([size]), []
            for _ in range(times):
                began = time.time()
                found = graph(x)
                found = found[0] if isinstance(found, list | tuple) else found
                total = float(tf.reduce_sum(found))
                seconds.append(time.time() - began)
            if abs(total - ranks * size) > size * 1e-3:
                raise ValueError(f"the sum of {ranks} x {size} ones is {total}")
            first, median = seconds[0], statistics.median(seconds[1:])
            parts.append(f"{size}: first {first:.3f} s, median {1e3 * median:.3f} ms")
    began = time.time()
    ring.close()
    parts.append(f"close {time.time() - began:.3f} s")
    if number == 0:
        print("; ".join(parts), flush=True)
    os._exit(0)


def main(ranks: int) -> None:
    from edl.trainer.session.kvstore import KeyValueStore

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    store = KeyValueStore(lambda *_: None)
    port = asyncio.run_coroutine_threadsafe(store.start(), loop).result()
    loop.call_soon_threadsafe(store.open, 1)
    command = [sys.executable, __file__, "--rank"]
    environment = {**os.environ, "SUMS_SECRET": store.secret}
    processes = [
        subprocess.Popen([*command, str(number), str(ranks), str(port)], env=environment)
        for number in range(ranks)
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        print("exit codes", codes, flush=True)
    os._exit(any(codes))


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank(*map(int, sys.argv[2:]))
    else:
        main(int(sys.argv[1]))
