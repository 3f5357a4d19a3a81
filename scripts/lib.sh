# Shared by the scripts: where things are, and how they speak.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${EDL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/edl}
uv_version=0.13.8

say() { printf '%s\n' "$*" >&2; }

# The Python that everything is built on.
find_python() {
  local candidate
  for candidate in python3.11 python3 python; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  say "set-up: Python 3.11 is needed and was not found (on Debian 12: apt-get install python3.11 python3.11-venv)"
  return 1
}

# uv, pinned, in the cache.
find_uv() {
  local home=$cache/uv-$uv_version
  if [ ! -x "$home/bin/uv" ]; then
    mkdir -p "$cache"
    "$(find_python)" -m venv "$home.$$"
    "$home.$$/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
    mv -T "$home.$$" "$home" 2>/dev/null || rm -rf "$home.$$" # another set-up was quicker
  fi
  printf '%s\n' "$home/bin/uv"
}
