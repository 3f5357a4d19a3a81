# SPDX-License-Identifier: Apache-2.0
"""The documents build as a site that asks no other host for anything, and a wrong link fails the build."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
LOADED = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]*)"|<link\b[^>]*\bhref="([^"]*)"')
OTHER_HOST = re.compile(r"(?:[a-z]+:)?//")


def test_the_site_has_every_page_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    done = subprocess.run([ROOT / "scripts" / "docs", tmp_path / "site"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    names = {page.relative_to(tmp_path / "site").parts[0] for page in pages}
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} <= names
    assert {"index.html", "examples", "chart", "changelog", "security"} <= names
    assert (tmp_path / "site" / "search" / "search_index.json").is_file()
    diagrams = sum(page.read_text().count("```mermaid") for page in (ROOT / "docs").glob("*.md"))
    assert diagrams and sum(page.read_text().count('<svg class="states"') for page in pages) == diagrams
    assert not any("mermaid" in page.read_text() for page in pages), "a diagram is shown as its source"
    loaded = {"".join(found) for page in pages for found in LOADED.findall(page.read_text())}
    assert loaded and [address for address in loaded if OTHER_HOST.match(address)] == []


def test_a_link_to_a_heading_that_does_not_exist_fails_the_build(tmp_path: Path) -> None:
    for name in ("docs", "examples/one", "scripts/dev", "chart", "patches", "tools/test_cluster"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("scripts/docs", "scripts/dev/site.py", "scripts/dev/state_diagram.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    # PyYAML does not know the tag of a function; the line is not what is tested here.
    text = re.sub(r"(?m)^ *slugify:.*\n", "", (ROOT / "mkdocs.yml").read_text())
    config = yaml.safe_load(text)
    config |= {"nav": None, "plugins": [], "extra_css": []}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    for name in (
        "CHANGELOG",
        "ARCHITECTURE",
        "CONTRIBUTING",
        "SECURITY",
        "CODE_OF_CONDUCT",
        "chart/README",
        "examples/README",
        "patches/README",
        "tools/test_cluster/README",
    ):
        (tmp_path / f"{name}.md").write_text("# A page\n")
    (tmp_path / "examples" / "one" / "README.md").write_text("# One\n\n[edl](../../README.md#edl)\n")
    (tmp_path / "README.md").write_text(
        "# edl\n\n[the ring](docs/ring.md#a-step), [one](examples/one/README.md), [a file](mkdocs.yml)\n"
    )

    def built(ring: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "docs" / "ring.md").write_text(ring)
        command = [tmp_path / "scripts" / "docs", tmp_path / "site"]
        return subprocess.run(command, capture_output=True, text=True)

    good = built("# The ring\n\n## A step\n")
    assert good.returncode == 0, good.stderr
    home = (tmp_path / "site" / "index.html").read_text()
    assert 'href="ring/#a-step"' in home and 'href="examples/one/"' in home
    assert "a file" in home and "mkdocs.yml" not in home, "a link to a file that is no page is its text"
    wrong = built("# The ring\n")
    assert wrong.returncode == 1
    assert "'index.md' contains a link 'ring.md#a-step'" in wrong.stderr
