# SPDX-License-Identifier: Apache-2.0
"""The protocol. All files but this one are generated from edl.proto and ps.proto by scripts/dev/proto.

ADMITTED is in the initial metadata of a worker's stream from the moment at which the master listens to it.
Before that, the worker sends nothing.

STANDS_BY is in the trailing metadata of each call that a master refuses because a different master acts.
"""

ADMITTED = "edl-admitted"
STANDS_BY = "edl-stands-by"
