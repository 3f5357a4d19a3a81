"""The journal of a job: its writer and its replay."""
