# SPDX-License-Identifier: Apache-2.0
"""Commands about a job, here or in a cluster."""
