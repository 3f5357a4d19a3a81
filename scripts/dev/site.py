# SPDX-License-Identifier: Apache-2.0
"""What mkdocs needs to show the documents of this repository as a site (a hook of mkdocs.yml).

Pages also lie outside of docs/: the README, the changelog, the chart's page, the examples. Links are written
as they work in the repository; here they become links between pages. A link to a file that is no page becomes
its text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "code-of-conduct.md": "CODE_OF_CONDUCT.md",
    "architecture.md": "ARCHITECTURE.md",
    "chart.md": "chart/README.md",
    "horovod-patches.md": "patches/README.md",
    "cluster.md": "tools/test_cluster/README.md",
    "examples.md": "examples/README.md",
}
LINK = re.compile(r"(!?)\[((?:`[^`\n]*`|[^]`])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of docs/."""
    for uri, path in ELSEWHERE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for readme in sorted((ROOT / "examples").glob("*/README.md")):  # the page of all examples links to them
        uri = f"examples/{readme.parent.name}.md"
        aside = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, abs_src_path=str(readme), inclusion=aside))
        for picture in readme.parent.glob("*.svg"):
            files.append(File.generated(config, uri.replace(".md", ".svg"), abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    source = Path(str(page.file.abs_src_path)).resolve()
    pages = {Path(str(file.abs_src_path)).resolve(): file.src_uri for file in files if file.abs_src_path}

    def replaced(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        path, _, heading = link.partition("#")
        if not path or re.match(r"[a-z]+:", link):
            return match[0]
        target = (source.parent / path).resolve()
        if target not in pages:
            return text if target.exists() else match[0]  # mkdocs names the link that leads nowhere
        uri = os.path.relpath(pages[target], os.path.dirname(page.file.src_uri))
        return f"{image}[{text}]({uri}{'#' + heading if heading else ''})"

    fences = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in fences)
