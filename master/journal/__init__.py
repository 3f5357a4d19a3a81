"""The journal of a job: written as things happen, and replayed."""
