# SPDX-License-Identifier: Apache-2.0
"""What a worker's process needs around training: its log, errors, watchdog, end and files."""
