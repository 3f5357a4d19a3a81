# SPDX-License-Identifier: Apache-2.0
"""What the workers of a ring agree on: the control vector, the ledger, and the epochs' history."""
