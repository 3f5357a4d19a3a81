# SPDX-License-Identifier: Apache-2.0
"""One training step: gradients, their all-reduce, and the update of the model."""
