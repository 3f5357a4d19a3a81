#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Pack what build.sh made into parts that one call to the GPU machine can carry: runs/gpu-part-1, -2, ...
#
# Git ignores runs/. $PART is the size of a part (default 54M).
set -euo pipefail
. "$(dirname "$0")/lib.sh"
stage=$KIT_HOME/stage
tar cf - -C "$KIT_HOME" small | zstd -q -6 -f -o "$stage/small.zst"
# The GPU machine need not have zstd.
cp "$(command -v zstd)" "$stage/"
for library in liblz4.so.1 liblzma.so.5 libz.so.1; do
  cp -L "$(ldconfig -p | awk -v name="$library" '$1 == name && !path { path = $NF } END { print path }')" "$stage/"
done
rm -rf "$root"/runs/gpu-part-* "$stage/parts"
mkdir "$stage/parts"
tar cf - -C "$stage" cc.zst framework.zst packages.zst small.zst zstd liblz4.so.1 liblzma.so.5 libz.so.1 |
  split -b "${PART:-54M}" -d - "$stage/parts/part."
number=0
for part in "$stage"/parts/part.*; do
  number=$((number + 1))
  mkdir -p "$root/runs/gpu-part-$number"
  mv "$part" "$root/runs/gpu-part-$number/"
done
du -sm "$root"/runs/gpu-part-*
