#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# On the GPU machine: put aside a part that came with this call, since the next call brings a different one.
#
#   scripts/gpu/take.sh runs/gpu-part-1
set -euo pipefail
. "$(dirname "$0")/lib.sh"
mkdir -p "$KIT_HOME/parts"
mv "$root/${1:?a folder with a part, as runs/gpu-part-1}"/part.* "$KIT_HOME/parts/"
ls -s --block-size=M "$KIT_HOME/parts"
