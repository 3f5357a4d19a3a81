"""What master, workers, command line and chart have agreed on: each name and number is written once, here.

phases      what a job is doing, and the states of a worker
exit_codes  of the master's and a worker's process
"""
