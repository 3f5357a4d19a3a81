# SPDX-License-Identifier: Apache-2.0
"""`edl mpi`: a job whose workers mpiexec starts.

command   the command
rank      one rank: its place, and its worker
"""
