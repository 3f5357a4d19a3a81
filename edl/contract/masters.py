"""How soon a master that has gone is missed, where another one stands by for it.

The acting master says every SAYS_SECONDS that it acts. A worker that has heard nothing for SILENT_SECONDS has
lost it, and tells those who stand by.
"""

SAYS_SECONDS = 1.0
SILENT_SECONDS = 3.0  # a busy machine delays a stream by less
