# SPDX-License-Identifier: Apache-2.0
"""`scripts/cluster`: a real Kubernetes of two nodes on this machine, up in seconds and gone as quickly.

    scripts/cluster up [--kwok N]         start it (the first time: install and build what it needs)
    scripts/cluster down                  end it, whole or half started, also after a crash
    scripts/cluster status                what runs, where, and how to use it; exits 1 when it is not up
    eval "$(scripts/cluster env)"         kubectl and helm for this shell; EDL_REGISTRY for images
    scripts/cluster kwok N                add fake nodes f1..fN
    scripts/cluster node cut|join NAME    take a node (n1, n2) off the network, put it back
    scripts/cluster node off|on NAME      power a node off (all it runs is killed), and on
    scripts/cluster part [A=B ...]        cut these addresses off from each other only
    scripts/cluster build                 only install and build
    scripts/cluster image-base            localhost/python:3.11-slim for buildah, where it cannot be pulled

Exit code 77: this machine lacks what a cluster needs, and the last line says what.
"""

from __future__ import annotations

import argparse
import fcntl
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from . import control, node, parts
from .processes import LOGS, kill, marked, run, running
from .settings import (
    ADMIN,
    API,
    BIN,
    BRIDGE,
    BRIDGE_MAC,
    CACHE,
    HOST,
    LOCK,
    NODE_CPUS,
    NODE_NET,
    NODES,
    POD_NET,
    REGISTRY,
    SERVICE_NET,
    SOURCE,
    STATE,
    CannotRun,
    ClusterError,
    say,
)
from .settings import node as node_named

LACKING = 77
CONTROL = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "coredns",
    "registry",
    "provisioner",
)
SCRIPTS = SOURCE.parents[1] / "scripts" / "dev"
STARTED = STATE / "started.json"  # written last, so it means: whole
SWITCHES = STATE / "sysctls.json"
# The kubelet sets these for the whole machine.
MACHINE_WIDE = (
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)


def build() -> None:
    parts.install_packages()
    parts.build()
    helm()  # which says itself that it is built, and for how long


def helm() -> str:
    """Where helm is, built if need be."""
    return subprocess.run(
        [SCRIPTS / "helm", "--where"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def up(kwok: int, owner: int) -> None:
    """Start the cluster, unless one that is whole is up.

    Raises:
        CannotRun: this machine lacks something.
        ClusterError: a part does not come up. What was started is ended again.
    """
    need_root()
    build()
    with only_one():
        if whole():
            together([partial(node.restore, n) for n in NODES])
            say("is up")
        else:
            tear_down()
            began = time.monotonic()
            try:
                start_all(owner)
            except BaseException:
                tear_down()
                raise
            say(f"up after {time.monotonic() - began:.1f} s")
        if kwok:
            control.start_kwok(kwok)


def start_all(owner: int) -> None:
    STATE.mkdir(parents=True)
    run("modprobe", "-a", "br_netfilter", "overlay", "nf_tables", ok=False)  # or they are built in
    SWITCHES.write_text(json.dumps({name: Path("/proc/sys", name).read_text() for name in MACHINE_WIDE}))
    BIN.mkdir()
    (BIN / "kubectl").symlink_to(parts.path("kubectl"))
    (BIN / "helm").symlink_to(helm())
    check_addresses()
    run("ip", "link", "add", BRIDGE, "address", BRIDGE_MAC, "type", "bridge")
    run("ip", "addr", "add", f"{HOST}/{NODE_NET.partition('/')[2]}", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    control.make_certificates()
    say("starting the control plane")
    control.start_control_plane()
    say("starting DNS, the registry and the nodes")
    control.start_provisioner()
    together([control.start_dns, control.start_registry, *(partial(node.boot, n) for n in NODES)])
    STARTED.write_text(
        json.dumps({"fingerprint": parts.fingerprint(), "owner": owner, "nextId": born(owner)})
    )


def check_addresses() -> None:
    """Raises ClusterError when this machine uses our addresses for something else.

    A route to more than ours is no harm: the narrower one wins.
    """
    ours = [ipaddress.IPv4Network(net) for net in (NODE_NET, POD_NET, SERVICE_NET)]
    for line in run("ip", "-4", "-o", "route", "show").splitlines():
        found = re.search(r"\d+\.\d+\.\d+\.\d+(/\d+)?", line)
        if found and not line.startswith("default"):
            used = ipaddress.IPv4Network(found[0])
            for net in ours:
                if used.subnet_of(net):
                    raise ClusterError(f"this machine has a route into {net}, which is ours: {line.strip()}")


def together(jobs: list[Callable[[], None]]) -> None:
    """Do all at the same time, to the end; then raise the first error."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        waiting = [pool.submit(job) for job in jobs]
    for done in waiting:
        done.result()


def whole() -> bool:
    """Whether a cluster of these programs is up with all its parts, though nodes may be off or cut off."""
    try:
        started = json.loads(STARTED.read_text())
    except FileNotFoundError:
        return False
    parts_up = set(CONTROL) <= running() and all(node.state(n) != "broken" for n in NODES)
    wanted = born(started["owner"]) == started.get("nextId", "")
    return parts_up and wanted and started["fingerprint"] == parts.fingerprint()


def born(pid: int) -> str:
    """When a process began, which distinguishes it from a later one of this id; "" without a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
    except OSError:
        return ""


def down() -> None:
    need_root()
    with only_one():
        began = time.monotonic()
        tear_down()
        say(f"down after {time.monotonic() - began:.1f} s")


def tear_down() -> None:
    """End all that is there, in any state.

    Raises:
        ClusterError: something does not end. The rest is left as it is: it may still be mounted.
    """
    # Processes that start others end first; the nodes' processes are killed with their nodes.
    kill(lambda: [pid for pid, part in marked().items() if part in (*CONTROL, "kwok")])
    together([partial(node.destroy, n) for n in NODES])
    kill(marked)
    run("ip", "link", "del", BRIDGE, ok=False)
    if SWITCHES.exists():
        for name, value in json.loads(SWITCHES.read_text()).items():
            Path("/proc/sys", name).write_text(value)
    if LOGS.exists():  # of the last cluster, to find out what went wrong
        shutil.rmtree(CACHE / "logs", ignore_errors=True)
        shutil.copytree(LOGS, CACHE / "logs")
    shutil.rmtree(STATE, ignore_errors=True)


def status() -> int:
    if not STATE.exists():
        print("down")
        return 1
    runs = running()
    up = STARTED.exists()
    print(f"Kubernetes    {parts.KUBERNETES}, {'up' if up else 'half started'}, API at https://{API}")
    for part in CONTROL:
        print(f"{part:<24}{'runs' if part in runs else 'MISSING'}")
    for n in NODES:
        print(f"node {n.name:<19}{node.state(n)}, {n.address}, {NODE_CPUS} CPUs, pods {n.pods}")
    if "kwok" in runs:
        print(f"{'kwok':<24}runs")
    print(f"registry                {REGISTRY} (http)")
    print(f"logs                    {LOGS}")
    if up and set(CONTROL) <= runs:
        print("use it                  " + 'eval "$(scripts/cluster env)"')
        print(control.kubectl("get", "nodes", "-o", "wide", "--request-timeout=3s", ok=False).rstrip())
    return 0 if whole() else 1


def env() -> None:
    need_up()
    print(f'export KUBECONFIG={ADMIN} PATH={BIN}:"$PATH" EDL_REGISTRY={REGISTRY}')


def add_kwok(nodes: int) -> None:
    need_root()
    with only_one():
        need_up()
        control.start_kwok(nodes)


def change_node(change: str, name: str) -> None:
    """Do to a node what may happen to one.

    Raises:
        ClusterError: there is no such node, or no cluster.
    """
    need_root()
    chosen = node_named(name)
    with only_one():
        need_up()
        {"cut": node.cut, "join": node.join, "off": node.power_off, "on": node.power_on}[change](chosen)


def part(pairs: list[str]) -> None:
    """Cut the addresses of these pairs off from each other, and no others.

    Raises:
        ClusterError: something is no pair of addresses, or there is no cluster.
    """
    need_root()
    found: list[tuple[str, str]] = []
    for pair in pairs:
        a, _, b = pair.partition("=")
        try:
            found.append((str(ipaddress.IPv4Address(a)), str(ipaddress.IPv4Address(b))))
        except ValueError as error:
            raise ClusterError(f"invalid pair {pair!r}: {error} (expected ADDRESS=ADDRESS)") from error
    with only_one():
        need_up()
        for each in NODES:
            if node.state(each) == "on":
                node.part(each, found)


def need_up() -> None:
    if not STARTED.exists():
        raise ClusterError("is not up (scripts/cluster up)")


def need_root() -> None:
    if os.geteuid() != 0:
        raise CannotRun("root is needed: nodes are network namespaces, mounts and cgroups")


@contextmanager
def only_one() -> Iterator[None]:
    """Two that change the cluster at once would each undo what the other does."""
    with open(LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another scripts/cluster")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    starting = verbs.add_parser("up")
    starting.add_argument("--kwok", type=int, default=0, metavar="N", help="with N fake nodes")
    starting.add_argument(
        "--owner", type=int, default=0, metavar="PID", help="of no use once this process is gone"
    )
    for verb in ("down", "status", "env", "build", "image-base"):
        verbs.add_parser(verb)
    verbs.add_parser("kwok").add_argument("nodes", type=int, metavar="N")
    changing = verbs.add_parser("node")
    changing.add_argument("change", choices=("cut", "join", "off", "on"))
    changing.add_argument("name", metavar="NAME")
    parting = verbs.add_parser("part")
    parting.add_argument("pairs", nargs="*", metavar="A=B")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    # A user's PATH may lack the places of ip and iptables; a proxy has no business between our parts.
    os.environ["PATH"] += ":/usr/local/sbin:/usr/sbin:/sbin"
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(
        filter(None, [os.environ.get("NO_PROXY"), HOST, NODE_NET, POD_NET, SERVICE_NET])
    )
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `status | head`
    args = parse(words)
    try:
        match args.verb:
            case "up":
                up(args.kwok, args.owner)
            case "down":
                down()
            case "status":
                return status()
            case "env":
                env()
            case "kwok":
                add_kwok(args.nodes)
            case "node":
                change_node(args.change, args.name)
            case "part":
                part(args.pairs)
            case "build":
                build()
            case "image-base":
                need_root()
                parts.install_packages()
                subprocess.run([SCRIPTS / "image-base"], check=True)
            case verb:  # else a verb that lost its code would do nothing, and call that a success
                raise AssertionError(f"nothing is done about {verb}")
    except CannotRun as lack:
        say(str(lack))
        return LACKING
    except ClusterError as error:
        say(str(error))
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode  # it has said why
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
