"""What the master answers over HTTP: health, metrics."""
