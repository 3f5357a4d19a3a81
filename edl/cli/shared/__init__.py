# SPDX-License-Identifier: Apache-2.0
"""What commands share: output, groups, and what a job is wherever it runs."""
