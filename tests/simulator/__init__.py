# SPDX-License-Identifier: Apache-2.0
"""A whole job in a moment: the real core, with simulated workers, clock, delays, losses and deaths.

    python -m tests.simulator --seed 17        one run, told event by event
    python -m tests.simulator --seeds 20000    many
    python -m tests.simulator --seeds 2000 --masters 2
    python -m tests.simulator --seeds 2000 --servers moves      hybrid, ps, moves, copies, gone or stuck

    world     one run: what chance has chosen for it, from its begin to its judgement
    clock     simulated time
    master    the real core, and what lies between it and its workers: inbox, timer, streams, its death
    masters   two of them, one stands by, and all that ships between Lease, masters (master_process) and
              workers (worker_stream); on processes (asyncio's loops), network (gRPC) and cluster (the API
              server) in simulated time
    fleet     the workers' processes: they start, send, receive, and end
    worker    one of them: the real loop of the trainer, on a main thread that waits in virtual time
    servers   parameter servers, which one in ten runs has: rows (hybrid), all weights (ps), rows that move to
              more servers and fewer, two copies of each, jobs that lose everything at once, so that only
              checkpoints are left (gone), servers that hang until they are restarted (stuck, stuck_servers);
              their processes, on disks in memory (server_processes, disk), the calls of workers
              (server_calls), the master's view of them (remote_servers), what must be so (server_checks)
    rings     the network between members: when a collective returns, and at which member
    faults    what goes wrong, and when
    checks    what must be so

What runs is what ships: the core, the messages on the wire, and each worker's session, loop, reports
and local ring. Only the model is different (tests/support/models/counting.py): its weights count
what was applied to them, so the oracle is the same as for real workers.

All chance comes from the seed. A stream is ordered; different streams are not.
"""
