#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run a command with Horovod over the stand-in, which build.sh has built.
#
#   scripts/gpu/standin/run.sh COMMAND [ARGUMENT...]
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
standin=$KIT_HOME/standin
mkdir -p "$standin/orders"
export PATH=$environment/bin:$PATH PYTHONPATH=$standin/horovod/nccl14:$small/tree KIT_HOROVOD=$standin/horovod
export EDL_PRETEND_GPU=1 CUDA_VISIBLE_DEVICES=-1 TF_CPP_MIN_LOG_LEVEL=3
export HOROVOD_BATCH_D2D_MEMCOPIES=0 # batched copies are kernels, which the stand-in cannot run
export FAKE_NCCL_INIT_MS=50 FAKE_NCCL_ORDERS=$standin/orders
exec env LD_PRELOAD="$standin/libfakegpu.so" "$@"
