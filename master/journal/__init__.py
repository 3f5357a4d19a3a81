# SPDX-License-Identifier: Apache-2.0
"""The journal of a job: its writer and its replay."""
