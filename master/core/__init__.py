# SPDX-License-Identifier: Apache-2.0
"""The pure core, which makes all decisions of a job: `(state, event, now) -> effects`.

It uses no clock, thread, socket, file, randomness or log. So tests of a week of failures run in seconds, and
a journal of events replays to the same end.
"""
