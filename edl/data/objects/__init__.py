# SPDX-License-Identifier: Apache-2.0
"""Objects of Python as readers: arrays, tables, datasets."""
