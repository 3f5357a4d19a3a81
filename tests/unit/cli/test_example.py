# SPDX-License-Identifier: Apache-2.0
"""`edl example`: what it lists, what it writes, and what it never overwrites."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from edl.cli.tools import example
from edl.errors import ConfigError, EdlError

ROOT = Path(__file__).parents[3]


def run(*words: str) -> list[str]:
    done = CliRunner().invoke(example.app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout.splitlines()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_example_is_listed_with_the_title_of_its_page() -> None:
    lines = run("list")
    assert [line.split()[0] for line in lines] == sorted(
        page.parent.name for page in (ROOT / "examples").glob("*/README.md")
    )
    assert "image_folder     Images in folders" in lines


def test_a_copy_has_all_files_and_the_commands_to_type_in_its_folder() -> None:
    _, *then = run("copy", "image_folder", "mine")
    assert then == [
        "next:",
        "  cd mine",
        "  python write_images.py images",
        "  edl run image_folder.py --workers 2 --epochs 10 --batch-size 64",
    ]
    for name in ("image_folder.py", "write_images.py"):
        assert Path("mine", name).read_text() == (ROOT / "examples" / "image_folder" / name).read_text()
    with pytest.raises(EdlError, match="mine: already exists; nothing was written"):
        run("copy", "vae", "mine")
    assert not Path("mine", "vae.py").exists()


@pytest.mark.parametrize("name", [path.parent.name for path in (ROOT / "examples").glob("*/README.md")])
def test_the_page_of_a_copy_has_the_commands_and_files_of_its_folder(name: str) -> None:
    run("copy", name)
    page = Path(name, "README.md").read_text()
    assert "examples/" not in page
    files = [word for line in page.splitlines() if line.startswith("$ ") for word in line.split()]
    written = {path.name for path in Path(name).iterdir()}
    assert written >= {file for file in files if file.endswith((".py", ".yaml"))}
    assert "edl run" in page


def test_an_unknown_example_and_a_folder_that_cannot_be_written_are_told() -> None:
    with pytest.raises(ConfigError, match="unknown example 'vea'; expected one of contrastive, dcgan"):
        run("copy", "vea")
    Path("file").touch()
    with pytest.raises(EdlError, match=r"file/mine: cannot write: .*Not a directory"):
        run("copy", "vae", "file/mine")
