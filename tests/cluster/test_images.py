# SPDX-License-Identifier: Apache-2.0
"""What is in the images and what is not, seen from a pod that may do nothing: restricted and read-only."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORKER_SHARE = 0.3
REBUILD_SECONDS = 60.0  # seen: 8, on two idle cores
COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "cpp", "as", "ld", "make", "cmake", "nvcc", "go", "rustc")

# Runs in the pod; prints what it finds.
LOOK = """
import importlib.util, json, os, shutil, sys, sysconfig
size, tests, headers, writable, uncompiled = {}, [], [], [], 0
ours = sysconfig.get_path("purelib"), "/opt"
skipped = {"/proc", "/sys", "/dev", "/tmp", "/run", "/var/run"}
for folder, folders, names in os.walk("/"):
    folders[:] = [f for f in folders if os.path.join(folder, f) not in skipped]
    if os.access(folder, os.W_OK):
        writable.append(folder)
    for name in names:
        info = os.lstat(os.path.join(folder, name))
        size[info.st_ino, info.st_dev] = info.st_size
    if folder.startswith(ours):
        paths = [os.path.join(folder, name) for name in names]
        tests += [os.path.join(folder, f) for f in folders if f == "tests"]
        headers += [path for path in paths if path.endswith((".h", ".hpp"))]
        sources = [path for path in paths if path.endswith(".py")]
        uncompiled += sum(not os.path.exists(importlib.util.cache_from_source(path)) for path in sources)
print(json.dumps({
    "uid": os.getuid(), "home": os.environ["HOME"], "cwd": os.getcwd(), "size": sum(size.values()),
    "compilers": [c for c in sys.argv[1].split() if shutil.which(c)],
    "headers": headers[:5], "tests": tests[:5], "writable": writable[:5], "uncompiled": uncompiled,
    "modules": [m for m in sys.argv[2].split() if importlib.util.find_spec(m)],
    "secrets": os.path.exists("/run/secrets/pip") or os.path.exists("/run/secrets/ca"),
}))
"""


def pod(image: str, command: Iterable[str], uid: int = 12345) -> dict[str, Any]:
    """A pod of the restricted profile with a file system that cannot be written, but for /tmp."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "look"},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": uid,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumes": [{"name": "tmp", "emptyDir": {}}],
            "containers": [
                {
                    "name": "look",
                    "image": image,
                    "command": list(command),
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


def output(namespace: Any, image: str, *command: str, uid: int = 12345) -> str:
    """What the command prints in such a pod; it must succeed."""
    namespace.restrict()
    namespace.kubectl("delete", "pod", "look", "--ignore-not-found", "--now")
    namespace.apply(pod(image, command, uid))
    [ended] = namespace.until(
        "pods", lambda pods: pods and pods[0]["status"]["phase"] in ("Succeeded", "Failed"), seconds=180
    )
    said = str(namespace.kubectl("logs", "look"))
    assert ended["status"]["phase"] == "Succeeded", said
    return said


def look(namespace: Any, image: str, modules: str) -> dict[str, Any]:
    said = output(namespace, image, "python", "-c", LOOK, " ".join(COMPILERS), modules)
    return dict(json.loads(said.splitlines()[-1]))


def test_images_hold_what_their_side_needs_and_no_more(namespace: Any, images: Any) -> None:
    master = look(
        namespace,
        images["master"],
        "edl.master edl.ps edl grpc numba tensorflow keras horovod edl.trainer edl.zoo pytest trainer ps",
    )
    assert master["modules"] == ["edl.master", "edl.ps", "edl", "grpc", "numba"]
    worker = look(
        namespace,
        images["worker"],
        "edl.trainer edl edl.zoo tensorflow horovod edl.master edl.ps pytest trainer ps",
    )
    assert worker["modules"] == ["edl.trainer", "edl", "edl.zoo", "tensorflow", "horovod"]
    assert master["size"] <= WORKER_SHARE * worker["size"], (master["size"], worker["size"])
    for found in (master, worker):
        assert found["uid"] == 12345
        assert found["home"] == "/tmp"
        assert found["compilers"] == []
        assert found["headers"] == []
        assert found["tests"] == []
        assert found["writable"] == []
        assert found["secrets"] is False
        # All but what is not meant to be compiled was: nothing can be kept of what is compiled at a start.
        assert found["uncompiled"] < 20


def test_a_worker_starts_where_nothing_can_be_written(namespace: Any, images: Any) -> None:
    code = (
        "import edl.trainer.__main__, edl.trainer.worker, edl.trainer.step.learner\n"
        "from edl.trainer.model import user_model\n"
        "from edl.trainer.ring.horovod import HorovodRing\n"
        "import horovod, pathlib, sklearn.datasets, subprocess, pyarrow.csv\n"
        "user_model.load('digits')\n"
        "ring = HorovodRing(0, 'lo', 'one')\n"
        "ring.form(0, 1); import tensorflow as tf; print(ring.reduce(tf.constant([3.0]))); ring.close()\n"
        "print(subprocess.run('horovodrun', capture_output=True, text=True).stderr.strip())\n"
        "print([p.name for p in pathlib.Path(horovod.__file__).parent.iterdir() if p.is_dir()])\n"
    )
    said = output(namespace, images["worker"], "python", "-c", code).splitlines()
    assert set(ast.literal_eval(said[-1])) == {"__pycache__", "common", "tensorflow"}
    assert "Start scripts with `edl horovod`" in said[-2]
    assert "[3.]" in said[-3]


def test_the_image_itself_names_a_user_who_is_not_root(namespace: Any, images: Any) -> None:
    """Without runAsUser the kubelet reads the user from the image, and refuses root."""
    for side in ("master", "worker"):
        unnamed = pod(images[side], ["id", "-u"])
        del unnamed["spec"]["securityContext"]["runAsUser"]
        namespace.kubectl("delete", "pod", "look", "--ignore-not-found", "--now")
        namespace.apply(unnamed)
        namespace.until("pods", lambda pods: pods and pods[0]["status"]["phase"] == "Succeeded", seconds=120)
        assert namespace.kubectl("logs", "look").strip() == "10001"


def test_the_master_answers_in_its_image(namespace: Any, images: Any) -> None:
    assert "--backend" in output(namespace, images["master"], "python", "-m", "edl.master", "--help")
    assert "zoo" in output(namespace, images["master"], "edl", "--help")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the images are made of."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    there = [name for name in names.stdout.split("\n") if name and (ROOT / name).is_file()]
    subprocess.run(["cp", "--parents", "-p", *there, tmp_path], cwd=ROOT, check=True)
    return tmp_path


def build(tree: Path, *flags: str) -> tuple[float, str]:
    began = time.monotonic()
    command: list[str | Path] = [tree / "scripts" / "images", "build", "--tag", "rebuilt", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - began, done.stderr


def test_a_change_of_code_rebuilds_in_seconds_and_no_change_rebuilds_nothing(tree: Path, images: Any) -> None:
    build(tree)
    with open(tree / "trainer" / "worker.py", "a") as file:
        file.write("# changed\n")
    seconds, said = build(tree)
    assert said.count("building") == 2
    assert seconds < REBUILD_SECONDS
    seconds, said = build(tree)
    assert said == ""
    assert seconds < 5


def test_an_archive_of_an_image_is_the_image_and_has_one_time(images: Any, tmp_path: Path) -> None:
    command: list[str | Path] = [
        ROOT / "scripts" / "images",
        "build",
        "--tag",
        images.tag,
        "--only",
        "master",
    ]
    env = os.environ | {"EDL_BUILDER": "buildah", "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run([*command, "--archive", tmp_path], env=env, check=True)
    file = tmp_path / f"edl-master-{images.tag}.oci.tar"
    with tarfile.open(file) as archive:
        members = archive.getmembers()
    assert {(member.mtime, member.uid) for member in members} == {(1700000000, 0)}
    assert [member.name for member in members] == sorted(member.name for member in members)
    pulled = subprocess.check_output(["buildah", "pull", "-q", f"oci-archive:{file}"], text=True)
    form = ["--type", "image", "--format", "{{.FromImageID}}"]
    built = subprocess.check_output(["buildah", "inspect", *form, f"edl-master:{images.tag}"], text=True)
    assert pulled.strip() == built.strip()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only", "ps"], "--only: ps is not an image; there are master and worker"),
        (["--archive", "nowhere"], "--archive: there is no folder nowhere"),
        (["--model-zoo", "nowhere"], "--model-zoo: there is no folder nowhere"),
        (["--tga", "x"], "scripts/images build [--push REGISTRY]"),
        (["--tag"], "scripts/images build [--push REGISTRY]"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], words: str) -> None:
    done = subprocess.run([ROOT / "scripts" / "images", "build", *flags], capture_output=True, text=True)
    assert done.returncode != 0
    assert words in done.stderr
