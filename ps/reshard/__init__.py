"""Resharding: moving rows between servers when the shard assignment changes."""
