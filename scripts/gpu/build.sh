#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build all that travels to the GPU machine, on a machine without a GPU.
#
#   scripts/gpu/build.sh [STEP...]
#
# The steps, in their order: environment prune compress cuda horovod patched gloo small. Without a STEP: all of them.
# The step `links` is for rehearsals only: links to this checkout and its .venv in place of a build.
# Needs Python 3.12, g++, cmake, make, patch, zstd, unzip, dpkg, 8 GB in $KIT_HOME, and an apt source with Debian's
# nvidia-cuda-toolkit 12.4 (Debian 13, non-free). apt only downloads two packages; APT_OPTIONS are further options
# for apt-get. Building for another card than an H100 or H200: see `prune` and HOROVOD_BUILD_CUDA_CC_LIST.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
downloads=$KIT_HOME/downloads stage=$KIT_HOME/stage
mkdir -p "$downloads" "$stage" "$horovod_source" "$horovod"

download() { # REQUIREMENT: its wheel for this kind of machine
  local platform platforms=()
  for platform in manylinux{2014,_2_17,_2_18,_2_27,_2_5,1}_x86_64; do platforms+=(--platform "$platform"); done
  "$environment/bin/python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 "${platforms[@]}" \
    -d "$downloads" "$1"
}

# What a worker needs of the lock, with `tensorflow` in place of `tensorflow-cpu`, and without S3.
environment() {
  local uv more
  uv=$(find_uv)
  "$uv" venv --clear --python "$(find_python 3.12)" "$environment"
  # for the status of GPUs, and to compile Horovod
  more=$(grep -oE '^(nvidia-ml-py|packaging|pip|setuptools|wheel)==[^ ]+' "$root/requirements.lock")
  {
    "$root/scripts/dev/requirements" worker libclang s3fs
    printf '%s\n' "$more"
  } | awk '/^[a-z0-9]/ && !/^tensorflow-cpu==/ { print $1 }' >"$KIT_HOME/requirements.txt"
  "$uv" pip install --python "$environment/bin/python" --no-deps -r "$KIT_HOME/requirements.txt"
  download tensorflow==2.21.0
  unzip -q -o "$downloads"/tensorflow-2.21.0-*.whl -d "$packages"
  install_edl
}

# Blank all GPU code but that of an H100 or H200, and drop symbols.
prune() {
  local file
  for file in libtensorflow_cc.so.2 libtensorflow_framework.so.2 python/lib_pywrap_tensorflow_common.so \
    python/profiler/internal/_pywrap_profiler_plugin.so; do
    "$environment/bin/python" "$kit/prune_fatbin.py" "$packages/tensorflow/$file" elf90
    strip -s "$packages/tensorflow/$file"
  done
  for file in compiler/mlir/stablehlo/stablehlo_extension.so compiler/tf2xla/ops/_xla_ops.so \
    lite/python/libpywrap_tflite_common.so; do
    strip -s "$packages/tensorflow/$file"
  done
}

compress() {
  zstd -q -f -12 --long=27 -T0 "$packages/tensorflow/libtensorflow_cc.so.2" -o "$stage/cc.zst"
  zstd -q -f -12 --long=27 -T0 "$packages/tensorflow/libtensorflow_framework.so.2" -o "$stage/framework.zst"
  tar cf - -C "$packages" --exclude-from="$kit/files-left-out.txt" . | zstd -q -8 -T0 -f -o "$stage/packages.zst"
}

# CUDA 12.4 in NVIDIA's layout, from two Debian packages and NVIDIA's wheels, and NCCL with its headers.
cuda() {
  local requirement file program toolkit=deb/usr/lib/nvidia-cuda-toolkit
  cd "$downloads"
  # shellcheck disable=SC2086 # several options
  apt-get ${APT_OPTIONS:-} download nvidia-cuda-toolkit libcu++-dev
  for file in ./*.deb; do dpkg -x "$file" deb; done
  for requirement in nvidia-cuda-runtime-cu12=={12.4.127,12.5.82,12.9.79} nvidia-cuda-nvcc-cu12=={12.4.131,12.5.82} \
    nvidia-nccl-cu12==2.31.2 py-spy; do
    download "$requirement"
  done
  for file in nvidia_*.whl py_spy*.whl; do unzip -q -o "$file" -d "${file%.whl}"; done
  rm -rf "$cuda" "$nccl"
  mkdir -p "$cuda"/{bin,lib64,include,nvvm/bin,nvvm/libdevice} "$nccl"
  cp $toolkit/bin/nvcc "$cuda/bin/"
  cp -r $toolkit/bin/crt "$cuda/bin/"
  cp $toolkit/bin/cicc "$cuda/nvvm/bin/"
  cp $toolkit/libdevice/* "$cuda/nvvm/libdevice/"
  for program in cudafe++ fatbinary ptxas nvlink bin2c; do cp "deb/usr/bin/$program" "$cuda/bin/"; done
  cp -r nvidia_cuda_runtime_cu12-12.4*/nvidia/cuda_runtime/include/* "$cuda/include/"
  cp -rn nvidia_cuda_nvcc_cu12-12.4*/nvidia/cuda_nvcc/include/* "$cuda/include/"
  cp -r deb/usr/include/cuda deb/usr/include/nv "$cuda/include/"
  cp nvidia_cuda_runtime_cu12-12.9*/nvidia/cuda_runtime/lib/*.a "$cuda/lib64/" # 12.4's wheel has no static library
  cp nvidia_cuda_runtime_cu12-12.4*/nvidia/cuda_runtime/lib/libcudart.so.12 "$cuda/lib64/"
  ln -sf libcudart.so.12 "$cuda/lib64/libcudart.so"
  # nvlink 12.4 rejects the device library of 12.9. Horovod does not use it, so an empty one is enough.
  rm -f "$cuda/lib64/libcudadevrt.a"
  gcc -xc -c - -o empty.o </dev/null
  ar rcs "$cuda/lib64/libcudadevrt.a" empty.o
  cat >"$cuda/bin/nvcc.profile" <<'PROFILE'
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
LD_LIBRARY_PATH += $(TOP)/lib64:
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64" $(_SPACE_)
CUDAFE_FLAGS +=
PTXAS_FLAGS +=
PROFILE
  cp -r nvidia_nccl_cu12-*/nvidia/nccl/* "$nccl/"
  ln -sf libnccl.so.2 "$nccl/lib/libnccl.so"
}

export_build_settings() { # as in scripts/dev/build-horovod, with NCCL
  export CUDACXX=$cuda/bin/nvcc HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME=$cuda HOROVOD_NCCL_HOME=$nccl
  export HOROVOD_NCCL_LINK=SHARED HOROVOD_BUILD_CUDA_CC_LIST=90 HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1
  export HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 MAKEFLAGS=-j$(nproc) LDFLAGS=-Wl,-s
  export PATH=$environment/bin:$cuda/bin:$PATH
}

# Horovod with NCCL and all patches but 14: the build `nccl`, to compare with.
horovod() {
  local patch
  cd "$horovod_source"
  export_build_settings
  "$environment/bin/python" -m pip download -q --no-deps --no-binary :all: --no-build-isolation --require-hashes \
    -r "$root/patches/horovod/sdist.txt" -d .
  rm -rf source without-14 wheels
  mkdir source
  tar xzf horovod-*.tar.gz -C source --strip-components 1
  for patch in "$root"/patches/horovod/*.patch; do
    case $patch in */14-*) ;; *) patch -s -d source -p1 <"$patch" ;; esac
  done
  cp -a source/horovod without-14
  sed -i "s/else 'RelWithDebInfo'/else 'Release'/" source/setup.py # without debug information it takes half the time
  "$environment/bin/python" -m pip wheel --no-deps --no-build-isolation -w wheels ./source
  rm -rf "$horovod/nccl"
  unzip -q wheels/horovod-*.whl -d "$horovod/nccl"
}

# The same with patch 14: the build `nccl14`. After a change of the patch only the files that it touches are compiled.
patched() {
  local file
  cd "$horovod_source"
  export_build_settings
  rm -rf with-14 "$horovod/nccl14"
  mkdir with-14
  cp -a without-14 with-14/horovod
  patch -s -d with-14 -p1 <"$(echo "$root"/patches/horovod/14-*.patch)"
  while read -r file; do
    cmp -s "with-14/horovod/$file" "source/horovod/$file" || cp "with-14/horovod/$file" "source/horovod/$file"
  done < <(cd with-14/horovod && find . -type f)
  make -C "$release" tensorflow
  cp -r "$horovod/nccl" "$horovod/nccl14"
  cp source/build/lib.linux-x86_64-cpython-312/horovod/tensorflow/*.so "$horovod/nccl14/horovod/tensorflow/"
}

# Horovod without GPU operations, as users without a GPU have it: the build `gloo`.
gloo() {
  local wheel
  wheel=$("$root/scripts/dev/build-horovod" --python 3.12)
  rm -rf "$horovod/gloo"
  unzip -q "$wheel" -d "$horovod/gloo"
}

# The tree, the builds of Horovod and a few files of CUDA that the GPU machine lacks.
small() {
  local nvcc=nvidia_cuda_nvcc_cu12-12.5*/nvidia/cuda_nvcc
  rm -rf "$small"
  mkdir -p "$small"/cuda_nvcc/{bin,nvvm} "$small/tree"
  cd "$downloads"
  cp $nvcc/bin/ptxas "$small/cuda_nvcc/bin/"
  cp -r $nvcc/nvvm/libdevice "$small/cuda_nvcc/nvvm/"
  cp nvidia_cuda_runtime_cu12-12.5*/nvidia/cuda_runtime/lib/libcudart.so.12 "$small/"
  find . -path '*py_spy*' -name py-spy -type f -exec cp {} "$small/" \;
  chmod +x "$small/py-spy" "$small"/cuda_nvcc/bin/*
  cp -r "$horovod" "$small/horovod"
  cd "$root"
  cp -r compat edl master trainer ps model_zoo chart patches tests benchmarks examples scripts pyproject.toml setup.py "$small/tree/"
  rm -rf "$small"/tree/tests/{cluster,chart,fakes}
  find "$small" -name __pycache__ -prune -exec rm -rf {} \;
  ln -s ../../environment "$small/tree/.venv" # scripts/storm starts the Python that it finds there
}

links() {
  if [ -d "$environment" ] && [ ! -L "$environment" ]; then
    say "$KIT_HOME has a build, which can rehearse: for links set KIT_HOME to a different folder"
    return 1
  fi
  mkdir -p "$small/horovod"
  ln -sfn "$root/.venv" "$environment"
  ln -sfn "$root" "$small/tree"
}

[ $# -gt 0 ] || set -- environment prune compress cuda horovod patched gloo small
for step in "$@"; do
  echo "== $step"
  (time "$step")
done
