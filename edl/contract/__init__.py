"""What the master, the workers and the tools agree on."""
