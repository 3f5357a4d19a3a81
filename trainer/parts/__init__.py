# SPDX-License-Identifier: Apache-2.0
"""What a job may have beside its training loop: one file for each part, one interface for all (part.py)."""
