#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the stand-in for CUDA's runtime and NCCL, and Horovod's library with patch 14 on top of it.
#
# ../build.sh must have run as far as `patched`: three files are compiled anew, all else is linked from there. With
# EDL_PRETEND_GPU set, these three files treat tensors in the CPU's memory as tensors of GPU 0.
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
standin=$KIT_HOME/standin sources=$horovod_source/source/horovod
mkdir -p "$standin"
cd "$release/horovod/tensorflow"
setting() { sed -n "s/^$1 = //p" CMakeFiles/tensorflow.dir/flags.make; }

compile() { # SOURCE NAME: compile a source file with the edits that are on stdin, a sed script, to $standin/NAME.o
  local edited=${1%.cc}_standin.cc # beside the original, for its includes
  sed -f - "$1" >"$edited"
  if cmp -s "$1" "$edited"; then
    say "$1: the edits for the stand-in do not match it any more"
    exit 1
  fi
  # eval, because CMake has quoted the settings for a shell.
  eval "g++ $(setting CXX_DEFINES) $(setting CXX_INCLUDES) $(setting CXX_FLAGS) -w -c '$edited' -o '$standin/$2.o'"
  rm "$edited"
}
compile "$sources/common/operations.cc" operations <<'EDITS'
s/set_device(device)/set_device(PretendDevice(device))/
s/e\.device = device;/e.device = PretendDevice(device);/
/^namespace horovod {/i\
#include <cstdlib>\
static int PretendDevice(int device) {\
  return device == -1 && getenv("EDL_PRETEND_GPU") ? 0 : device;\
}
EDITS
compile "$sources/tensorflow/mpi_ops.cc" mpi_ops <<'EDITS'
s/  if (device_context != nullptr) {/  if (device_context != nullptr \&\& !getenv("EDL_PRETEND_GPU")) {/
EDITS
compile "$sources/common/ops/nccl_operations.cc" nccl_operations <<'EDITS'
s/      e\.ready_event_list\.PushEventsToSet/      if (!getenv("EDL_PRETEND_GPU")) e.ready_event_list.PushEventsToSet/
EDITS

sed -E -e "s#[^ ]*ops/nccl_operations\.cc\.o#'$standin/nccl_operations.o'#" \
  -e "s#[^ ]*common/operations\.cc\.o#'$standin/operations.o'#" -e "s#[^ ]*dir/mpi_ops\.cc\.o#'$standin/mpi_ops.o'#" \
  -e 's#-lcudart_static##; s#-lcudadevrt##; s#[^ ]*libnccl[^ ]*##g' -e "s# -o [^ ]*# -o '$standin/mpi_lib.so'#" \
  CMakeFiles/tensorflow.dir/link.txt >"$standin/link.sh"
bash "$standin/link.sh"
g++ -std=c++17 -O1 -shared -fPIC -I"$cuda/include" -I"$nccl/include" "$kit/standin/fake_gpu.cc" \
  -o "$standin/libfakegpu.so" -lpthread -lrt

rm -rf "$standin/horovod"
mkdir "$standin/horovod"
cp -r "$horovod/nccl14" "$horovod/gloo" "$standin/horovod/"
cp "$standin/mpi_lib.so" "$standin"/horovod/nccl14/horovod/tensorflow/mpi_lib.cpython-312-x86_64-linux-gnu.so
