# SPDX-License-Identifier: Apache-2.0
"""Jobs of this machine: values, directories, processes."""
