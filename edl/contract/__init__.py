"""What the sides of a job agree on: the protocol, and the words, numbers and arithmetic that all use.

Nothing here reads a file but `artifacts`, and nothing talks to anybody.
"""
