"""Readers: where a job's records come from."""
