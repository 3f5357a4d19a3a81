"""Settings of the unit tests: no deadline per example, for the machine may be busy; and a failure
of hypothesis prints what replays it."""

from hypothesis import settings

settings.register_profile("edl", deadline=None, print_blob=True)
settings.load_profile("edl")
