# SPDX-License-Identifier: Apache-2.0
"""`edl run`: a job on this machine, from its output directory to its result."""
