"""The worker's side of parameter servers: connections, pulls and pushes, recovery."""
