"""The user's model and data: found, read, described, fingerprinted and copied."""
