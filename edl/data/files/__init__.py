# SPDX-License-Identifier: Apache-2.0
"""Files by address, and the records of several files as one."""
