"""What the workers of a ring agree on: the control vector, the ledger, epochs, and the parts' interfaces."""
