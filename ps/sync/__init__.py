"""Updates in lockstep with a ring: staged by a step, then committed or dropped."""
