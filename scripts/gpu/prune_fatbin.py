# SPDX-License-Identifier: Apache-2.0
"""Blank the GPU code in a library that a given card does not use; the file's layout stays as it is.

prune_fatbin.py LIBRARY KEEP...     KEEP: elf90, ptx90, ... as the last line that is printed names them

A fat binary is a header (magic 0xBA55ED50, u16 version, u16 header size, u64 size) and entries (u16 kind: 1
for PTX, 2 for machine code; u16, u32 header size, u64 padded size, ..., u32 at 28: the architecture). The
driver takes the entry that fits best, so the payload of others may be zeros, which compress to nothing.
"""

import collections
import mmap
import struct
import subprocess
import sys

MAGIC = struct.pack("<I", 0xBA55ED50)
KINDS = {1: "ptx", 2: "elf"}


def section(path: str) -> tuple[int, int]:
    """Return (offset, size) of the library's GPU code in the file."""
    for line in subprocess.check_output(["readelf", "-SW", path], text=True).splitlines():
        parts = line.replace("[ ", "[").split()
        if len(parts) > 5 and parts[1] == ".nv_fatbin":
            return int(parts[4], 16), int(parts[5], 16)
    raise SystemExit(f"{path}: no section .nv_fatbin")


def main(path: str, keep: set[str]) -> None:
    start, size = section(path)
    sizes: collections.Counter[str] = collections.Counter()
    blanked = 0
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
        at = start
        while (at := memory.find(MAGIC, at, start + size)) >= 0:
            _, version, header, length = struct.unpack_from("<IHHQ", memory, at)
            if (version, header) != (1, 16):
                raise SystemExit(
                    f"{path}: fat binary of version {version}, header {header}; expected 1 and 16"
                )
            entry, at = at + header, at + header + length
            while entry < at:
                kind, _, head, padded = struct.unpack_from("<HHIQ", memory, entry)
                architecture = struct.unpack_from("<I", memory, entry + 28)[0]
                name = f"{KINDS.get(kind, kind)}{architecture}"
                sizes[name] += padded
                if name not in keep:
                    memory[entry + head : entry + head + padded] = bytes(padded)
                    blanked += padded
                entry += head + padded
        memory.flush()
    found = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sorted(sizes.items()))
    print(f"{path}: {found}; blanked {blanked / 1e6:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1], set(sys.argv[2:]))
