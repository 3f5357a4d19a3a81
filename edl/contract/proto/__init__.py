"""The protocol, generated from edl.contract.proto by scripts/proto."""
