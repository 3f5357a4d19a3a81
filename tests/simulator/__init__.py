"""A whole job in a moment: the real core, with simulated workers, clock, delays, losses and deaths.

    python -m tests.simulator --seed 17        one run, told event by event
    python -m tests.simulator --seeds 20000    many

    world     one run: what chance has chosen for it, from its begin to its judgement
    clock     simulated time
    master    the real core, and what lies between it and its workers: inbox, timer, streams, its death
    fleet     the workers' processes: they start, speak, are told, and end
    rings     what the trainer does: members meet, synchronise, step, and leave
    faults    what goes wrong, and when
    checks    what must be so

A simulated worker follows the protocol of trainer/worker.py: what its main thread, its link and
its ring do and in which order, but no tensor. Its "weights" count what was applied to them, so
the oracle is the same as for real workers.

All chance comes from the seed. A stream is ordered; different streams are not.
"""
