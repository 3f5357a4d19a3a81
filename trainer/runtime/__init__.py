"""What a worker's process needs around training: its log, errors, watchdog, end and files."""
