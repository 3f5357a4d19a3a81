"""The master's view of parameter servers: whether they live, when there are any, and their processes."""
