"""For all tests."""

import signal


def pytest_configure() -> None:
    # A shell that starts the tests in the background has them ignore SIGINT, and what they start
    # inherits that; but they interrupt jobs as a terminal does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
