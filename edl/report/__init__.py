# SPDX-License-Identifier: Apache-2.0
"""The report of a job: pictures and tables from its journal, in one HTML file.

timeline   what happened, as plain data: workers, ring changes, losses, checkpoints
pace       the steps of each worker: its own computing, and waiting for the slowest member
servers    the parameter servers over time
hours      the hours of all workers by what they were spent on, and their price
reading    the timeline, read from the journal
pictures   the timeline drawn with Matplotlib, as SVG or PNG
lanes      the pictures with a row for each worker or server
page       the HTML page around the pictures
write      the report as a file
live       the same pages while the job trains, served on loopback
tables     the style and the tables of a page
at_end     the report of a job that has just ended, written by a process of its own
"""

PICTURES = (
    "ring",
    "metrics",
    "workers",
    "stragglers",
    "servers",
    "goodput",
    "hours",
    "stalls",
    "checkpoints",
)
