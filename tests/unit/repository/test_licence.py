# SPDX-License-Identifier: Apache-2.0
"""Each source file says under which licence it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
LINE = "SPDX-License-Identifier: Apache-2.0"
SUFFIXES = (".py", ".sh", ".proto", ".tpl", "Dockerfile")
FOLDERS = ("chart/templates/", "docker/", "scripts/")
NO_COMMENTS = (".json", ".md", ".toml", "left-out.txt")


def test_each_source_file_begins_with_its_licence() -> None:
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    sources = [
        ROOT / name
        for name in files
        if (name.endswith(SUFFIXES) or (name.startswith(FOLDERS) and not name.endswith(NO_COMMENTS)))
        and "_pb2" not in name
        and (ROOT / name).is_file()
    ]
    assert len(sources) > 600
    missing = [
        str(path.relative_to(ROOT))
        for path in sources
        if (text := path.read_text("utf-8")).strip() and LINE not in "\n".join(text.splitlines()[:2])
    ]
    assert not missing
