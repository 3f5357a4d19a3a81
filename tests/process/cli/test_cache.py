# SPDX-License-Identifier: Apache-2.0
"""A cache holds whole things only, each made once, even if many ask for it at once and some are killed.

Each kind of thing is asked for through its own script, in an empty cache. What is quick is really made; of
what takes minutes, its makers are stand-ins, and each stops half-way until the test lets it go on.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
ARCHIVE = """if True:
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path
    from machine.parts import image_archive
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(image_archive, "pause:1", {"pause": Path("/bin/true")}, {}, {}) for _ in range(2)]
    print(*{archive.result() for archive in both})
"""
PROGRAM = """if True:
    from machine import parts
    parts.build("pause")
    print(parts.path("pause"))
"""


@dataclass(frozen=True)
class Kind:
    """How something is asked for, and the path that is answered; none if it does not lie in the cache."""

    name: str
    command: tuple[str, ...]
    answer: str = "^$"


QUICK = (
    Kind("uv", ("bash", "-c", ". scripts/dev/lib.sh && find_uv"), r"/uv-[\d.]+/bin/uv$"),
    Kind("Prometheus", ("scripts/dev/prometheus",), r"/prometheus/usr/bin$"),
    Kind("an image archive", (sys.executable, "-c", ARCHIVE), r"/cluster/pause-\w+.tar$"),
)
SLOW = (
    Kind("a Go program", (sys.executable, "-c", PROGRAM), r"/cluster/pause-\w+/pause$"),
    Kind("helm", ("scripts/dev/helm", "--where"), r"/helm-v[\d.]+-kubernetes-[\d.]+/helm$"),
    Kind("a schema", ("scripts/dev/kube-schema", "v1.29.0"), r"/kube-schema/v1.29.0.json$"),
    Kind("Horovod", ("scripts/dev/build-horovod", "--compiled"), r"/horovod-\w+/horovod-0.whl$"),
    Kind("the peers", ("scripts/dev/bench-peer",), r"/peer-\w+/bin/python$"),
    Kind("the base image", ("scripts/dev/image-base",)),
    Kind("an image", ("scripts/images", "build", "--only", "master", "--build-arg", "WORKER_BASE=any")),
)
# What the makers of slow things do, as far as the scripts see. A maker makes its file in two halves.
STAND_IN = """#!/bin/bash
set -eu
make() {
  mkdir -p "$(dirname "$1")"
  echo "the first half" >"$1"
  mkfifo "$STORE/gate-$$"
  echo $$ >>"$STORE/arrivals"
  read -r _ <"$STORE/gate-$$"
  echo "the second half, by $$" >>"$1"
}
after() { while [ "$2" != "$1" ]; do set -- "$1" "${@:3}"; done; printf '%s\\n' "$3"; }
"""
STAND_INS = {
    "go": """case "$*" in
  *"mod download"*) make "$GOMODCACHE/${!#}/api/openapi-spec/swagger.json" ;;
  install*) make "$GOBIN/helm" ;;
  *) make "$(after -o "$@")" ;;
esac""",
    "python": """case "$*" in
  *"pip download"*) tar czf "$(after -d "$@")/horovod-0.tar.gz" -C "$STORE" arrived ;;
  *"pip wheel"*) make "$(after -w "$@")/horovod-0.whl" ;;
esac""",
    "uv": """case "$1 ${!#}" in
  venv*) mkdir -p "${!#}/bin"; cp "${0%/*}/python" "${!#}/bin/" ;;
  *.whl) cp "${!#}" "$(after --python "$@").whl" ;;
esac""",
    "debootstrap": """mkdir -p "${!#}"/{usr/local/bin,usr/lib/python3/dist-packages,usr/share,var,tmp}""",
    "buildah": """case "$1" in
  inspect) sha256sum <"$STORE/images/${!#}" ;;
  commit) make "$STORE/images/${!#}" ;;
  bud) make "$STORE/images/$(after -t "$@")" ;;
esac""",
    "patch": "",
}


class Cache:
    """An empty cache, and those that ask for a thing in it."""

    def __init__(self, folder: Path, kind: Kind, stand_ins: bool):
        self.home, self.store, self.kind = folder / "cache", folder / "store", kind
        self.store.mkdir()
        os.mkfifo(self.store / "arrivals")
        (self.store / "arrived").touch()
        # Open for writing too, so that there is never an end of it.
        self.arrivals = os.fdopen(os.open(self.store / "arrivals", os.O_RDWR))
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("EDL_", "HOROVOD_"))
        }
        self.env = kept | {
            "EDL_CACHE": str(self.home),
            "EDL_QUICK_CACHE": str(self.home),
            "PYTHONPATH": f"{ROOT}/tools/test_cluster:{ROOT}/scripts/dev",
            "STORE": str(self.store),
        }
        if stand_ins:
            self._stand_in(folder / "tools")

    def _stand_in(self, tools: Path) -> None:
        version = re.search(r"^uv_version=(.*)$", (ROOT / "scripts/dev/lib.sh").read_text(), re.MULTILINE)
        assert version
        uv = self.home / f"uv-{version[1]}" / "bin"
        for folder in (tools, uv):
            folder.mkdir(parents=True)
        for name, script in STAND_INS.items():
            (tools / name).write_text(f"{STAND_IN}{script}\n")
            (tools / name).chmod(0o755)
        for name in ("uv", "python"):
            (tools / name).rename(uv / name)
        self.env |= {"PATH": f"{tools}:{self.env['PATH']}", "EDL_BUILDER": "buildah"}

    def ask(self, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.kind.command,
            cwd=ROOT,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def half_made(self) -> psutil.Process:
        """The next maker that has made its first half."""
        return psutil.Process(int(self.arrivals.readline()))

    def go_on(self, maker: psutil.Process) -> None:
        (self.store / f"gate-{maker.pid}").write_text("\n")

    def whole(self, answer: str, maker: psutil.Process) -> bool:
        """Whether it is the answer that was to come, and is what this maker has made."""
        files = [*self.home.rglob("*"), *self.store.glob("images/**/*")]
        texts = [file.read_text(errors="replace") for file in files if file.is_file()]
        made = {text for text in texts if "half" in text and "make()" not in text}
        right = re.search(self.kind.answer, answer) and Path(answer or self.home).exists()
        return bool(right) and made == {f"the first half\nthe second half, by {maker.pid}\n"}

    @property
    def aside(self) -> list[Path]:
        return list(self.home.rglob("*.making.*"))


def named(kind: Kind) -> str:
    return kind.name


@pytest.fixture
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    cache = Cache(tmp_path, request.param, stand_ins=request.param in SLOW)
    with cache.arrivals:
        yield cache


@pytest.mark.parametrize("cache", QUICK, ids=named, indirect=True)
def test_what_two_ask_for_at_once_is_made_once(cache: Cache) -> None:
    both = [cache.ask() for _ in range(2)]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    [answer] = {out.strip() for out, _ in said}
    assert re.search(cache.kind.answer, answer)
    assert Path(answer).exists()
    assert "".join(err for _, err in said).count("log: ") <= 1
    assert cache.aside == []


@pytest.mark.parametrize("cache", SLOW, ids=named, indirect=True)
def test_who_asks_for_what_is_being_made_waits_for_it(cache: Cache) -> None:
    read, write = os.pipe()
    both = [cache.ask(stderr=write) for _ in range(2)]
    os.close(write)
    with open(read) as said:
        maker = cache.half_made()
        heard = next(line for line in said if "waiting for another process" in line)
        assert heard
        cache.go_on(maker)
        answers = {process.communicate()[0].strip() for process in both}
        assert [process.returncode for process in both] == [0, 0], said.read()
    [answer] = answers
    assert cache.whole(answer, maker)
    assert cache.aside == []


@pytest.mark.parametrize("cache", SLOW, ids=named, indirect=True)
def test_whoever_is_killed_leaves_nothing_half_made(cache: Cache) -> None:
    # The maker dies: the waiting process says so, and where the log is.
    failing = cache.ask()
    cache.half_made().kill()
    said = failing.communicate()[1]
    assert failing.returncode != 0
    [log] = set(re.findall(r"its whole log: (/.*)", said))
    assert Path(log).exists()
    assert cache.aside == []

    # The waiting process dies: the maker continues and does not know it.
    killed = cache.ask()
    orphan = cache.half_made()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert len(cache.aside) == 1

    # The next one makes it whole, and removes what the other had begun.
    asking = cache.ask()
    maker = cache.half_made()
    cache.go_on(maker)
    answer, said = asking.communicate()
    assert asking.returncode == 0, said
    assert cache.aside == []
    orphan.kill()
    assert cache.whole(answer.strip(), maker)
