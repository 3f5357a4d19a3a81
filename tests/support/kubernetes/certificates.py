# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests, made by openssl, in folders like mounted Secrets of cert-manager."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

NEW_KEY = "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"


@dataclass(frozen=True)
class Authority:
    """A certificate authority.

    Args:
        folder: an empty folder for the authority's own files.
    """

    folder: Path

    @classmethod
    def new(cls, folder: Path) -> Authority:
        folder.mkdir(parents=True, exist_ok=True)
        _openssl(
            folder,
            "req",
            "-x509",
            *NEW_KEY,
            "-keyout",
            "ca.key",
            "-out",
            "ca.crt",
            "-days",
            "2",
            "-subj",
            "/CN=authority",
        )
        return cls(folder)

    def issue(self, folder: Path, *names: str, days: int = 1) -> Path:
        """Write tls.crt, tls.key and ca.crt for these hosts to `folder`; with -1 days they have expired."""
        folder.mkdir(parents=True, exist_ok=True)
        kinds = ("IP" if name[0].isdigit() or ":" in name else "DNS" for name in names)
        alternatives = ",".join(f"{kind}:{name}" for kind, name in zip(kinds, names, strict=True))
        (self.folder / "extensions").write_text(f"subjectAltName={alternatives}")
        new = folder / "new"
        new.mkdir()
        request, made = new / "request", new / "tls.crt"
        _openssl(
            self.folder, "req", *NEW_KEY, "-keyout", new / "tls.key", "-out", request, "-subj", "/CN=master"
        )
        vouching = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions")
        _openssl(self.folder, "x509", "-req", "-in", request, *vouching, "-days", days, "-out", made)
        request.unlink()
        (new / "ca.crt").write_bytes((self.folder / "ca.crt").read_bytes())
        for file in new.iterdir():
            file.replace(folder / file.name)
        new.rmdir()
        return folder


def _openssl(folder: Path, *words: object) -> None:
    command = ["openssl", *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
