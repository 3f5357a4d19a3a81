#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# On the GPU machine: check that TensorFlow, Horovod and edl work before minutes are spent on experiments.
#
# $SMOKE_SECONDS is the time limit (default 60). The machine's own data come first.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
. "$KIT_HOME/env.sh"
out=${OUT:-$KIT_HOME/results} limit=${SMOKE_SECONDS:-60}
mkdir -p "$out"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
printf '%s cores; kernel %s; %s\n' "$(nproc)" "$(uname -r)" "$(ldd --version | sed -n 1p)"

run() { # BUILD NAME [OPTION]: smoke.py with this build of Horovod; its output goes to NAME.out and NAME.err
  PYTHONPATH=$small/horovod/$1:$small/tree TF_CPP_MIN_LOG_LEVEL=0 \
    timeout "$limit" "$environment/bin/python" "$kit/smoke.py" "${@:3}" >"$out/$2.out" 2>"$out/$2.err"
}
run nccl14 smoke & computing=$!
run gloo imports --imports & importing=$!
code=0
wait "$computing" || code=$?
wait "$importing" || code=$?
cat "$out/smoke.out" "$out/imports.out"
grep -h -E 'Cannot dlopen|Could not|rror|Created device|not found|ptxas' "$out/smoke.err" "$out/imports.err" |
  cut -c1-260 | sort -u | sed -n 1,30p || true
exit "$code"
