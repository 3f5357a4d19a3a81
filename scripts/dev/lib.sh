# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts: where things are, and how they speak.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# What is made once. What takes less than a minute to make may lie elsewhere: .ci/run makes it again each time.
cache=${EDL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/edl}
quick_cache=${EDL_QUICK_CACHE:-$cache}
uv_version=0.13.8
pythons='3.13 3.12 3.11' # all tests pass on each; the images have the first
unset PYTHONPATH PYTHONHOME # what is built and set up sees its own environment, not a caller's packages
export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1} # the certificates of the machine, which pip uses, too: a company's own

say() { printf '%s\n' "$*" >&2; }

# The Python that everything is built on: the one that `python3` is, if edl runs on it, else the newest that is
# found, also among pyenv's. With a version (3.13): one of that version.
find_python() {
  local wanted=${1:-$pythons} version candidate found candidates=(python3)
  for version in $wanted; do
    candidates+=("python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python3)
  done
  for candidate in "${candidates[@]}"; do
    # Not a virtual environment, which may go, but what it was made from.
    found=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2], sys._base_executable)' 2>/dev/null) || continue
    if [[ " $wanted " = *" ${found%% *} "* ]]; then
      printf '%s\n' "${found#* }"
      return
    fi
  done
  wanted=${wanted// /, }
  say "Python ${wanted/%, 3.11/ or 3.11} is needed and was not found (on Debian: apt-get install python3 python3-venv)"
  return 1
}

# The path of an entry of a cache, made by a function unless it is there: scripts/dev/cached.py says how.
#
#   cached [--whole FUNCTION] [--group NAME] ENTRY "SCRIPT: what is being made" FUNCTION [ARGUMENT...]
#
# The function makes $made, may leave in $work what it likes, and runs in a shell of its own, in which any error is
# the end. It has this script's functions, the variables of this file and its arguments, else only what is exported.
cached() {
  local options=() shell
  shell="set -euo pipefail; $(declare -p root cache quick_cache uv_version pythons); $(declare -f)"
  while [[ $1 = --* ]]; do
    case $1 in
      --whole) options+=(--whole "$shell; $2") ;;
      --group) options+=(--group "$2") ;;
    esac
    shift 2
  done
  if [ ${#options[@]} = 0 ] && [ -e "$1" ]; then printf '%s\n' "$1"; return; fi
  "$(find_python)" "$root/scripts/dev/cached.py" "${options[@]}" --say "$2" "$1" -- bash -c "$shell; \"\$@\"" bash "${@:3}"
}

# uv, pinned.
find_uv() {
  local home
  home=$(cached "$quick_cache/uv-$uv_version" "set-up: fetching uv $uv_version" make_uv) && printf '%s\n' "$home/bin/uv"
}

make_uv() {
  "$(find_python)" -m venv "$made"
  "$made/bin/python" -m pip install --disable-pip-version-check "uv==$uv_version"
}
