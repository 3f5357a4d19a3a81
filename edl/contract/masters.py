# SPDX-License-Identifier: Apache-2.0
"""Timeouts for detecting a lost master in jobs with standby masters.

The acting master sends a sign of life every SAYS_SECONDS. A worker that receives none for SILENT_SECONDS
considers the master lost and notifies the standby masters.
"""

SAYS_SECONDS = 1.0
SILENT_SECONDS = 3.0  # longer than a busy machine delays a stream
