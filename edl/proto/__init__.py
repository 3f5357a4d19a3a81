"""The protocol, generated from edl.proto by scripts/proto."""
