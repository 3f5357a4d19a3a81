# SPDX-License-Identifier: Apache-2.0
"""Run the command line with `python -m edl.cli`, where no console script is installed."""

from edl.cli import main

main()
