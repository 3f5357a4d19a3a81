"""Checkpoints: written, restored, begun with, and the copy in memory."""
