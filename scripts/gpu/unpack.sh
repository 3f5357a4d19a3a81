#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# On the GPU machine: unpack the parts that take.sh put aside, and make an environment of them.
#
# The CUDA libraries, cuDNN, NCCL, SciPy and scikit-learn are not in the parts, they would be too large. They come from
# a Python environment of that machine, such as PyTorch's: KIT_LIBRARIES is its site-packages folder (default: the
# first one that has cuDNN).
set -euo pipefail
. "$(dirname "$0")/lib.sh"
parts=("$KIT_HOME"/parts/part.*)
if [ ! -e "${parts[0]}" ]; then
  say "no parts in $KIT_HOME/parts: run take.sh first"
  exit 1
fi
report() { printf '[%3d s] %s\n' "$SECONDS" "$*"; }

libraries=${KIT_LIBRARIES:-}
if [ -z "$libraries" ]; then
  found=$(find /opt /usr/lib /usr/local "$HOME" -maxdepth 8 -path "$KIT_HOME" -prune -o \
    -type d -path '*/site-packages/nvidia/cudnn' -print 2>/dev/null || true)
  libraries=$(dirname "$(dirname "${found%%$'\n'*}")")
fi
if [ ! -d "$libraries/nvidia" ]; then
  say "no Python environment with CUDA's libraries was found: set KIT_LIBRARIES to its site-packages folder"
  exit 1
fi
report "CUDA's libraries come from $libraries"

bundle=$KIT_HOME/bundle linked=$KIT_HOME/cuda12
rm -rf "$environment" "$small" "$bundle" "$linked"
mkdir -p "$packages/tensorflow" "$environment/bin" "$bundle" "$linked"
cat "${parts[@]}" | tar xf - -C "$bundle"
report "joined: $(cd "$bundle" && echo *)"

decompress() { LD_LIBRARY_PATH=$bundle "$bundle/zstd" -q -d --long=27 -c "$bundle/$1.zst"; }
decompress cc >"$packages/tensorflow/libtensorflow_cc.so.2" & jobs=($!)
decompress framework >"$packages/tensorflow/libtensorflow_framework.so.2" & jobs+=($!)
decompress packages | tar xf - -C "$packages" & jobs+=($!)
decompress small | tar xf - -C "$KIT_HOME" & jobs+=($!)
for job in "${jobs[@]}"; do wait "$job"; done
report unpacked

python=$(readlink -f "$(find_python 3.12)")
ln -sf "$python" "$environment/bin/python"
ln -sf python "$environment/bin/python3"
printf 'home = %s\ninclude-system-site-packages = false\nversion = 3.12\n' "$(dirname "$python")" \
  >"$environment/pyvenv.cfg"
install_edl
for package in scipy scipy.libs sklearn scikit_learn.libs joblib threadpoolctl.py narwhals; do
  if [ -e "$libraries/$package" ]; then ln -sfn "$libraries/$package" "$packages/$package"; fi
done
mkdir -p "$packages/nvidia"
ln -sfn "$small/cuda_nvcc" "$packages/nvidia/cuda_nvcc" # where XLA looks for ptxas

# TensorFlow asks for the names of CUDA 12. That machine may have CUDA 13, whose libraries do as well.
link() { # NAME PATTERN
  local file
  for file in "$libraries"/nvidia/*/lib/$2; do
    if [ -e "$file" ]; then ln -sf "$file" "$linked/$1"; return; fi
  done
  say "no $2 below $libraries/nvidia: a GPU may not be found"
}
link libcublas.so.12 'libcublas.so.1[0-9]'
link libcublasLt.so.12 'libcublasLt.so.1[0-9]'
link libcufft.so.11 'libcufft.so.1[0-9]'
link libcusolver.so.11 'libcusolver.so.1[0-9]'
link libcusparse.so.12 'libcusparse.so.1[0-9]'
link libnvJitLink.so.12 'libnvJitLink.so.1[0-9]'
link libcupti.so.12 'libcupti.so.1[0-9]'
link libnvrtc.so.12 'libnvrtc.so.1[0-9]'
link libcudnn.so.9 'libcudnn.so.9'
link libnccl.so.2 'libnccl.so.2'
cp "$small/libcudart.so.12" "$linked/"
search=$linked
for folder in "$libraries"/nvidia/*/lib; do search+=:$folder; done
cat >"$KIT_HOME/env.sh" <<SETTINGS
export LD_LIBRARY_PATH='$search'
export XLA_FLAGS='--xla_gpu_cuda_data_dir=$small/cuda_nvcc'
export CUDA_CACHE_PATH='$KIT_HOME/cuda-cache' CUDA_CACHE_MAXSIZE=4000000000
SETTINGS
report linked

# Some files of these packages are for other versions of Python and do not compile.
"$environment/bin/python" -m compileall -q -j "$(nproc)" "$packages"/{tensorflow,keras,numpy,grpc,google,absl} \
  "$small"/{tree,horovod} >/dev/null 2>&1 || true
report "compiled; $(du -sh "$environment" | cut -f1)"
