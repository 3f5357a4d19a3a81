# SPDX-License-Identifier: Apache-2.0
"""What the cluster is made of: Debian packages, Go programs built once, and two tiny images.

Everything built lies in the cache under a hash of what it is built from, one folder per program,
so an interrupted build goes on where it was and a changed version builds only itself.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cached import NotMade, builder, cached, locked  # of scripts/dev, which scripts/cluster puts on the path

from .settings import CACHE, QUICK, SOURCE, CannotRun, ClusterError, say

MODULE = SOURCE / "go"
KUBERNETES = next(
    line.split()[1]
    for line in (MODULE / "go.mod").read_text().splitlines()
    if line.split()[:1] == ["k8s.io/kubernetes"]
)

# package: what it brings
PACKAGES = {
    "buildah": "buildah",
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iproute2": "ip",
    "iptables": "iptables",
    "nftables": "nft",
    "conntrack": "conntrack",
    "kmod": "modprobe",
    "openssl": "openssl",
    "busybox-static": "/bin/busybox",
    "debootstrap": "debootstrap",
}


@dataclass(frozen=True)
class Program:
    """A Go program: of the module in `go` where it has no version, else by itself.

    coredns, kwok and the registry are each built by themselves, because each stands on
    another Kubernetes than ours and one module can have but one.
    """

    name: str
    package: str
    version: str = ""
    variables: str = ""
    minutes: float = 1.0  # that its build takes on two idle cores, after those before it
    brings: str = ""  # a folder of its module that it needs to run

    @property
    def flags(self) -> list[str]:
        return ["-trimpath", f"-ldflags=-s -w {self.variables}"]

    @property
    def directory(self) -> Path:
        recipe = [self.package, self.version, *self.flags, self.brings]
        if not self.version:
            recipe += [(MODULE / name).read_text() for name in ("go.mod", "go.sum", "pause/main.go")]
        key = hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:16]
        return CACHE / f"{self.name}-{key}"

    @property
    def path(self) -> Path:
        return self.directory / self.name


def _kubernetes(name: str, minutes: float) -> Program:
    version = f"-X k8s.io/component-base/version.gitVersion={KUBERNETES}"
    major, minor, _ = KUBERNETES.removeprefix("v").split(".")
    version += "".join(
        f" -X k8s.io/component-base/version.git{k}={v}" for k, v in {"Major": major, "Minor": minor}.items()
    )
    return Program(name, f"k8s.io/kubernetes/cmd/{name}", variables=version, minutes=minutes)


# The minutes are shares of a measured build of all, in this order: 58 minutes on two busy cores, some 20 on
# idle ones. What programs have in common is built with the first of them.
BUSY = 3  # times as long
PROGRAMS = {
    program.name: program
    for program in (
        Program("pause", "./pause", minutes=0.6),
        Program("etcd", "go.etcd.io/etcd/server/v3", minutes=2.7),
        _kubernetes("kubectl", minutes=2.9),
        _kubernetes("kube-apiserver", minutes=5.2),
        _kubernetes("kube-controller-manager", minutes=1.8),
        _kubernetes("kube-scheduler", minutes=0.1),
        _kubernetes("kubelet", minutes=0.4),
        _kubernetes("kube-proxy", minutes=0.1),
        Program("coredns", "github.com/coredns/coredns", "v1.12.4", minutes=2.6),
        Program("registry", "github.com/distribution/distribution/v3/cmd/registry", "v3.0.0", minutes=1.9),
        Program("kwok", "sigs.k8s.io/kwok/cmd/kwok", "v0.8.0", minutes=1.6, brings="kustomize/stage"),
    )
}


def path(name: str) -> str:
    """Where a program is, built if need be."""
    return str(PROGRAMS[name].path)


def fingerprint() -> str:
    """Identify all programs: a cluster of other programs is a different cluster."""
    return hashlib.sha256("\0".join(path(name) for name in PROGRAMS).encode()).hexdigest()[:16]


def install_packages() -> None:
    """What Debian has, where it is missing.

    Raises:
        CannotRun: something is missing and there is no apt-get, or no right to use it.
        ClusterError: apt-get failed.
    """
    missing = [package for package, file in PACKAGES.items() if not shutil.which(file, path=_search_path())]
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise CannotRun(f"{', '.join(missing)} missing (on Debian: apt-get install {' '.join(missing)})")
    say(f"installing {' '.join(missing)}")
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-qq"]
    for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
        done = subprocess.run(
            [*apt, *command],
            capture_output=True,
            text=True,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
        # A stale or foreign source makes `update` fail though Debian's own is fine: `install` decides.
        if done.returncode and command[0] == "install":
            raise ClusterError(
                f"apt-get could not install {' '.join(missing)}:\n{done.stdout[-500:]}{done.stderr[-1500:]}"
            )


def _search_path() -> str:
    return os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"


def build(*names: str) -> None:
    """The named programs, or all of them, into the cache; those that are there are left as they are.

    Raises:
        CannotRun: something is to be built and there is no Go.
        ClusterError: a program does not build; its log is named.
    """
    wanted = [PROGRAMS[name] for name in names or PROGRAMS]
    if all(program.path.exists() for program in wanted):
        return
    if not shutil.which("go"):
        raise CannotRun("go is missing (1.26 or later), the cluster's programs are built with it")
    # One lock for all, for they share Go's caches. Two builds at once: the second finds what the first made.
    with locked(CACHE / "build", say):
        missing = [program for program in wanted if not program.path.exists()]
        minutes, began = sum(program.minutes for program in missing), time.monotonic()
        say(
            f"building {len(missing)} programs, once, into {CACHE}: about {minutes:.0f} min on two idle "
            f"cores, {BUSY * minutes:.0f} min beside other work"
        )
        for number, program in enumerate(missing, 1):
            seconds = time.monotonic() - began
            rest = remaining([p.minutes for p in missing], number - 1, seconds)
            say(f"  {number} of {len(missing)}: {program.name} ({seconds / 60:.0f} min so far, {rest})")
            try:
                cached(program.directory, partial(_build, program), say=say)
            except NotMade as error:
                raise ClusterError(f"{program.name} does not build:\n{error}") from error
        say(f"  built after {(time.monotonic() - began) / 60:.0f} min")
        if all(program.path.exists() for program in PROGRAMS.values()):
            # Go's own caches are gigabytes, and nothing is left that needs them.
            say("  removing Go's caches")
            shutil.rmtree(CACHE / "go", ignore_errors=True)


def remaining(minutes: Sequence[float], done: int, seconds: float) -> str:
    """How long the rest of a build will take, for people, from how long it took so far.

    Args:
        minutes: of each program on idle cores.
        done: how many of the programs are built.
        seconds: that these took.
    """
    rest, expected = sum(minutes[done:]), sum(minutes[:done])
    if expected < 1:  # too little to tell how busy the machine is
        return f"{rest:.0f} to {BUSY * rest:.0f} min to go"
    return f"about {max(1.0, rest * seconds / 60 / expected):.0f} min to go"


def _build(program: Program, made: Path) -> None:
    env = {
        "CGO_ENABLED": "0",
        "GOMODCACHE": str(CACHE / "go" / "modules"),
        "GOCACHE": str(CACHE / "go" / "objects"),
        "GOFLAGS": f"{os.environ.get('GOFLAGS', '')} -modcacherw -buildvcs=false".strip(),
    }
    made.mkdir()
    if program.version:
        words = ["go", "install", *program.flags, f"{program.package}@{program.version}"]
        env["GOBIN"] = str(made)
    else:
        words = ["go", "build", *program.flags, "-o", str(made / program.name), program.package]
    log = CACHE / f"{program.name}.log"
    builder(words, log, env, cwd=MODULE, say=lambda text: say(f"    {program.name}: {text}; log: {log}"))(
        made
    )
    if program.brings:
        module = Path(env["GOMODCACHE"]) / f"{program.package.split('/cmd/')[0]}@{program.version}"
        shutil.copytree(module / program.brings, made / Path(program.brings).name)


def image_archives() -> list[Path]:
    """Archives of the images that every node has from the start: pause and busybox.

    Made of nothing but what is here already, since no public image can be counted on.
    """
    busybox = Path("/bin/busybox")
    commands = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    links = {f"bin/{command}": "busybox" for command in commands if command != "busybox"}
    return [
        image_archive(
            "pause:1", {"pause": Path(path("pause"))}, {}, {"Entrypoint": ["/pause"], "User": "65535:65535"}
        ),
        image_archive("busybox:1", {"bin/busybox": busybox}, links, {"Cmd": ["sh"], "Env": ["PATH=/bin"]}),
    ]


def image_archive(
    name: str, files: dict[str, Path], links: dict[str, str], config: dict[str, object]
) -> Path:
    """An image of one layer, in the form of `docker save`, in the cache."""
    key = hashlib.sha256(json.dumps([name, links, config]).encode())
    for file in files.values():
        key.update(file.read_bytes())
    archive = QUICK / f"{name.split(':')[0]}-{key.hexdigest()[:16]}.tar"
    return cached(archive, partial(_pack, name, files, links, config))


def _pack(
    name: str, files: dict[str, Path], links: dict[str, str], config: dict[str, object], made: Path
) -> None:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for directory, mode in {"bin": 0o755, "etc": 0o755, "tmp": 0o1777}.items():
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        for to, source in files.items():
            entry = tarfile.TarInfo(to)
            entry.mode, entry.size = 0o755, source.stat().st_size
            tar.addfile(entry, io.BytesIO(source.read_bytes()))
        for to, target in links.items():
            entry = tarfile.TarInfo(to)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    description = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer.getvalue()).hexdigest()]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [f"localhost/{name}"], "Layers": ["layer.tar"]}]
    with tarfile.open(made, "w") as tar:
        for entry_name, content in {
            "layer.tar": layer.getvalue(),
            "config.json": json.dumps(description).encode(),
            "manifest.json": json.dumps(manifest).encode(),
        }.items():
            entry = tarfile.TarInfo(entry_name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
