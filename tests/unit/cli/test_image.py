# SPDX-License-Identifier: Apache-2.0
"""`edl image`: what it writes beside a user's models, what it calls, what it refuses."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edl import config
from edl.cli.tools import image
from edl.config import values
from edl.errors import EdlError

GOOD = "def model():\n    return 1\ndef data(split):\n    return 1\n"


def run(*words: object) -> str:
    """What the command prints.

    Raises:
        EdlError: as `edl` would print it.
    """
    result = CliRunner().invoke(image.app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "My-Models"
    folder.mkdir()
    (folder / "alpha.py").write_text(GOOD)
    (folder / "beta.py").write_text(GOOD)
    (folder / "helper.py").write_text("def help():\n    return 1\n")
    return folder


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing in it, for a test to put its own docker or buildah into."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("EDL_BUILDER", "PIP_CERT", "REQUESTS_CA_BUNDLE", "PIP_INDEX_URL", "BUILDAH_ISOLATION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    return folder


def tool(folder: Path, name: str, code: str = "") -> Path:
    """An executable that keeps its arguments, and the pip.conf it is given, beside itself."""
    path = folder / name
    path.write_text(
        f"#!{sys.executable}\nimport os, re, sys\n"
        f"said = ' '.join(sys.argv[1:])\nopen({str(path)!r} + '.said', 'a').write(said + '\\n')\n"
        f"found = re.search(r'id=pip,src=(\\S+)', said)\n"
        f"if found: open({str(path)!r} + '.pip', 'w').write(open(found[1]).read())\n{code}\n"
    )
    path.chmod(0o755)
    return Path(f"{path}.said")


def test_init_writes_what_build_and_helm_need(models: Path) -> None:
    said = run("init", models, "--base-image", "registry.example.org/edl-worker:9")
    assert f"wrote {models / 'Dockerfile'}" in said
    assert f"next: edl image build --image my-models:1 {models}" in said
    dockerfile = (models / "Dockerfile").read_text()
    assert "ARG BASE=registry.example.org/edl-worker:9\n" in dockerfile
    assert "\nUSER 10001:10001\n" in dockerfile
    assert "RUN --mount" not in dockerfile
    assert "  # or: /models/beta.py" in (models / "values.yaml").read_text()
    merged = values.load([models / "values.yaml"], [])
    assert config.parse(merged).model.module == "/models/alpha.py"
    assert merged["worker"]["image"]["repository"] == "my-models"
    assert merged["worker"]["image"]["tag"] == "1"


def test_init_installs_what_the_models_require(models: Path) -> None:
    (models / "requirements.txt").write_text("humanize\n")
    run("init", models)
    assert "-c /opt/edl/constraints.txt -r /opt/edl/models.txt" in (models / "Dockerfile").read_text()


def test_init_takes_the_images_name(models: Path) -> None:
    run("init", models, "--image", "host:5000/team/net:0.2")
    assert "repository: host:5000/team/net\n" in (models / "values.yaml").read_text()
    run("init", models, "--image", "host:5000/team/net", "--force")
    assert 'tag: "latest"\n' in (models / "values.yaml").read_text()


def test_init_overwrites_nothing_without_being_told(models: Path) -> None:
    run("init", models)
    run("init", models)  # all as it was: nothing is lost
    (models / "Dockerfile").write_text("FROM mine\n")
    (models / "values.yaml").unlink()
    with pytest.raises(EdlError, match="Dockerfile already exists; nothing was written"):
        run("init", models)
    assert not (models / "values.yaml").exists()
    assert (models / "Dockerfile").read_text() == "FROM mine\n"
    run("init", models, "--force")
    assert "ARG BASE" in (models / "Dockerfile").read_text()


def test_init_without_a_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def model(:\n")
    said = run("init", tmp_path)
    assert f"no model found in {tmp_path}" in said
    assert "module: /models/my_model.py" in (tmp_path / "values.yaml").read_text()
    with pytest.raises(EdlError, match=r"folder .* not found"):
        run("init", tmp_path / "nowhere")


def test_build_uses_buildah_where_docker_does_not_answer(models: Path, tools: Path) -> None:
    run("init", models)
    tool(tools, "docker", "sys.exit('no daemon')")
    called = tool(tools, "buildah")
    said = run("build", "--image", "host:5000/net:2", models, "--extra-index", "https://example.org/simple")
    words = called.read_text()
    assert words.startswith("bud --layers --network host --isolation chroot ")
    assert words.endswith(f"-t host:5000/net:2 {models}\n")
    assert (
        Path(f"{tools}/buildah.pip").read_text() == "[global]\nextra-index-url = https://example.org/simple\n"
    )
    assert "worker.image.repository=host:5000/net,worker.image.tag=2" in said


def test_build_prefers_docker(models: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("init", models)
    docker, buildah = tool(tools, "docker"), tool(tools, "buildah")
    run("build", "--image", "net:2", models)
    assert docker.read_text().splitlines()[-1].startswith("buildx build --load --secret id=pip,src=")
    assert not buildah.exists()
    monkeypatch.setenv("EDL_BUILDER", "buildah")
    run("build", "--image", "net:2", models)
    assert buildah.exists()


def test_the_build_reaches_the_index_as_this_machine_does(
    models: Path, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("init", models)
    called = tool(tools, "buildah")
    settings = "[global]\ncert = /my/ca.pem\nindex-url = https://example.org/%(x)s\nextra-index-url = https://a.example\n"
    (tmp_path / "pip.conf").write_text(settings)
    run("build", "--image", "net:2", models, "--extra-index", "https://b.example")
    assert "--secret id=ca,src=/my/ca.pem " in called.read_text()
    assert Path(f"{tools}/buildah.pip").read_text().splitlines() == [
        "[global]",
        "index-url = https://example.org/%(x)s",
        "extra-index-url = https://a.example https://b.example",
        "cert = /run/secrets/ca",
    ]
    monkeypatch.setenv("PIP_INDEX_URL", "https://c.example")
    run("build", "--image", "net:2", models)
    assert "index-url = https://c.example\n" in Path(f"{tools}/buildah.pip").read_text()


def test_build_refuses_a_model_that_is_none_before_it_builds(models: Path, tools: Path) -> None:
    called = tool(tools, "buildah")
    with pytest.raises(EdlError, match=r"no Dockerfile found; create one with `edl image init"):
        run("build", "--image", "net:2", models)
    run("init", models)
    (models / "alpha.py").write_text("def model(size):\n    return size\ndef data(split):\n    return 1\n")
    with pytest.raises(EdlError, match=r"alpha.py: line 1: model\(size\) is called as model\(\)"):
        run("build", "--image", "net:2", models)
    (models / "alpha.py").unlink()
    with pytest.raises(
        EdlError, match=r"values.yaml: model.module is /models/alpha.py, but file .*alpha.py was not found"
    ):
        run("build", "--image", "net:2", models)
    assert not called.exists()


@pytest.mark.parametrize(
    ("has", "builder", "words"),
    [
        ("", "", "docker is not installed; buildah is not installed"),
        ("docker", "", r"docker is not usable \(no daemon here\); buildah is not installed"),
        ("docker", "docker", r"docker is not usable \(no daemon here\)$"),
        (
            "docker",
            "buildah",
            "docker or buildah is needed to build and push images: buildah is not installed$",
        ),
        ("", "podman", "EDL_BUILDER: invalid value 'podman' \\(expected docker or buildah\\)"),
    ],
)
def test_no_tool_is_told(
    models: Path, tools: Path, monkeypatch: pytest.MonkeyPatch, has: str, builder: str, words: str
) -> None:
    run("init", models)
    if has:
        tool(tools, has, "sys.exit('first\\nno daemon here')")
    if builder:
        monkeypatch.setenv("EDL_BUILDER", builder)
    with pytest.raises(EdlError, match=words):
        run("build", "--image", "net:2", models)


def test_a_build_that_fails_says_what_to_do(models: Path, tools: Path) -> None:
    run("init", models)
    tool(tools, "buildah", "sys.exit(3)")
    with pytest.raises(EdlError, match=r"exit code 3; net:2 was not built. If its base image was not found"):
        run("build", "--image", "net:2", models)


def test_push(tools: Path) -> None:
    called = tool(tools, "buildah")
    assert "pushed host:5000/net:2" in run("push", "host:5000/net:2", "--plain-http")
    assert called.read_text() == "push --tls-verify=false host:5000/net:2 docker://host:5000/net:2\n"
    with pytest.raises(EdlError, match="net:2: registry missing"):
        run("push", "net:2")
    called = tool(tools, "docker")
    run("push", "host:5000/net:2")
    assert called.read_text().splitlines()[-1] == "push host:5000/net:2"
