"""Every decision of a job, made from values: `(state, event, now) -> effects`.

No clock, thread, socket, file, randomness or log in here: the tests of a week of
failures run in seconds, and a journal of events replays to the same end.
"""
