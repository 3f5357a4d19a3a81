# SPDX-License-Identifier: Apache-2.0
"""The pages name what is there: each link between them leads somewhere, and each file exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from edl import config
from edl.cli.app import app
from edl.config import values

ROOT = Path(__file__).parents[3]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "chart", "patches", "tools/test_cluster")),
    *(ROOT / "scripts").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
MAX_WORDS = 45_000
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = found[name] = found.get(name, -1) + 1
        names.add(f"{name}-{count}" if count else name)
    return names


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_link_leads_to_a_page_and_a_heading_that_exist(page: Path) -> None:
    wrong = []
    for link in LINK.findall(CODE.sub("", page.read_text())):
        path, _, heading = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (heading and heading not in anchors(target)):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize(
    "page",
    sorted(page for page in PAGES if page.name != "CHANGELOG.md"),  # which also names what was
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_each_script_and_file_that_a_page_names_exists(page: Path) -> None:
    tops = "compat|edl|master|trainer|ps|model_zoo|examples|tests|docker|patches"
    files = rf"(?:{tops})/[\w./-]*\.(?:py|sh|proto|toml|yaml)\b|scripts/[\w./-]*\w"
    named = set(re.findall(rf"(?<![\w./$~-])(?:{files})", page.read_text()))
    assert sorted(name for name in named if "NAME" not in name and not (ROOT / name).exists()) == []


@pytest.mark.parametrize("folder", ["compat", "edl", "master", "ps", "trainer"])
def test_the_architecture_names_each_folder_of_the_code_and_no_other(folder: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    row = text.partition(f"\n| `{folder}/` | `")[2].partition("|")[2].partition("\n")[0]
    made = {each.name for each in (ROOT / folder).iterdir() if each.is_dir() and not each.is_symlink()}
    assert set(re.findall(r"`(\w+)`", row)) == made - {"__pycache__"}


def test_no_page_or_message_has_a_user_install_the_package_of_another_project() -> None:
    """On the public index, the name `edl` is not ours (pyproject.toml)."""
    folders = [ROOT / name for name in ("compat", "edl", "master", "trainer", "ps", "model_zoo")]
    texts = [*PAGES, *(file for folder in folders for file in folder.rglob("*.py"))]
    foreign = re.compile(r"\bedl\[[a-z]|pip install (?:-\S+ )*['\"]?edl\b(?![-/.])")
    assert foreign.search("pip install 'edl[onnx]'") and foreign.search("pip install edl\n")
    assert not foreign.search("pip install edl-trainer")
    found = [
        f"{file.relative_to(ROOT)}: {hit[0]}" for file in texts for hit in foreign.finditer(file.read_text())
    ]
    assert found == []


def parsed(words: list[str]) -> Any:
    """The context that the command line of edl makes of these words, without running the command."""
    command: Any = typer.main.get_command(app)
    name, context, rest = "edl", None, words
    while True:
        context = command.make_context(name, rest, parent=context)
        if not hasattr(command, "commands"):
            return context
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])


def edl_commands(page: Path) -> list[str]:
    """The words after `$ edl` in the console blocks of a page, up to a pipe."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    return re.findall(r"^\$ (?:[A-Z_]+=\S+ )*edl ([^|\n]*)", text, re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    sorted(
        page for page in PAGES if page.name != "commands.md" and edl_commands(page)
    ),  # which has [OPTIONS]
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_each_edl_command_of_a_page_has_arguments_and_values_that_exist(page: Path) -> None:
    for command in edl_commands(page):
        try:
            context = parsed(shlex.split(command, comments=True))
            config.parse(values.load([], context.params.get("sets") or []))
            if context.command.name in ("chaos", "rm"):
                assert context.params["directory"] or context.params.get("release"), "expected a job"
        except Exception as error:
            raise AssertionError(f"$ edl {command}: {error}") from error


def test_the_first_screen_of_the_readme_installs_trains_and_tests() -> None:
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:25])
    [block] = re.findall(r"```console\n(.*?)```", screen, re.DOTALL)
    assert re.findall(r"^\$ ([\w/]+(?: clone| --all)?)", block, re.MULTILINE) == [
        "git clone",
        "scripts/run",
        "scripts/test",
        "scripts/test --all",
    ]


def test_the_pages_have_no_more_words_than_they_may() -> None:
    """Pages that are generated, or list measurements, do not count."""
    made = ("commands", "configuration", "keras-api", "metrics", "python-api", "state-tables")
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.stem not in made]
    assert sum(len(page.read_text().split()) for page in pages) <= MAX_WORDS
