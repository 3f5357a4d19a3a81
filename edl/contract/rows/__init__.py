"""How rows are placed on servers and sent: buckets, placement, shares, and the wire format."""
