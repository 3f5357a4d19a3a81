#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run experiments one after the other, each with its own time limit, and print their table.
#
#   scripts/gpu/run.sh SECONDS NAME[:SECONDS]...
#
# The first SECONDS limit the whole call. Results go to $OUT: table.txt, results.txt, logs.tgz. The exit status is
# 1 if an experiment with patch 14 failed, 124 after a time-out. experiments.py has the names.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
# A machine without a GPU has no such file, and can still rehearse.
if [ -e "$KIT_HOME/env.sh" ]; then . "$KIT_HOME/env.sh"; fi
export OUT=${OUT:-$KIT_HOME/results} PATH=$environment/bin:$small:$PATH # py-spy is in $small
seconds=${1:?the time limit of the call, in seconds}
shift
timeout -k 3 "$seconds" "$environment/bin/python" "$kit/experiments.py" "$@"
