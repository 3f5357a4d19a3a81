# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts of this folder: where things are, on the machine that builds and on the one with the GPU.
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$kit/../dev/lib.sh"
export KIT_HOME=${KIT_HOME:-$cache/gpu}
environment=$KIT_HOME/environment # a virtual environment
packages=$environment/lib/python3.12/site-packages
small=$KIT_HOME/small # what is neither TensorFlow nor a Python package; build.sh names its contents
cuda=$KIT_HOME/cuda
nccl=$KIT_HOME/nccl
horovod_source=$KIT_HOME/horovod-source
horovod=$KIT_HOME/horovod # builds of Horovod, each in a folder of its own
release=$horovod_source/source/build/temp.linux-x86_64-cpython-312/Release # CMake's folder
unset PYTHONDONTWRITEBYTECODE # else each import of TensorFlow compiles its Python code again: 11 s of CPU

# Make the tree in $small/tree importable and give the environment the command edl.
install_edl() {
  printf '%s\n' "$small/tree" >"$packages/edl.pth"
  local command=$environment/bin/edl
  printf '#!%s/bin/python\nimport sys\nfrom edl.cli import main\nsys.exit(main())\n' "$environment" >"$command"
  chmod +x "$command"
}
