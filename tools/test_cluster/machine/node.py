# SPDX-License-Identifier: Apache-2.0
"""One real node: containerd, kubelet and kube-proxy in a network of their own.

    boot ──▶ on ──power_off──▶ off ──boot──▶ on ...    destroy: from anywhere, to nothing
             on ──cut──▶ on, without network ──join──▶ on

Powering off keeps what a disk keeps (images, kubelet's checkpoints) and loses what memory loses
(processes, mounts, the network): the kubelet that comes up again finds what it would after a reboot.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from pathlib import Path

from . import parts
from .control import PKI, kubeconfig, kubectl
from .processes import START_SECONDS, kill, marked, run, start, wait
from .settings import (
    BRIDGE,
    HOST,
    NODE_CPUS,
    NODE_MEMORY_GIB,
    NODES,
    POD_NET,
    REGISTRY,
    SERVICE_NET,
    SLOW,
    CannotRun,
    ClusterError,
    Node,
)

CGROUPS = Path("/sys/fs/cgroup")
CAP_SYS_RESOURCE = 24
MIB = 1024**2
EVICT_BELOW_MIB = 100


def boot(node: Node) -> None:
    """From nothing or from powered off to Ready.

    Raises:
        ClusterError: a part does not come up; with the end of its log.
    """
    for name in ("cni", "kubelet", "logs", "run"):
        (node.directory / name).mkdir(parents=True, exist_ok=True)
    _plug_in(node)
    _make_cgroup(node)
    _start_containerd(node)
    _start_kubelet(node)
    waiting = f"--timeout={START_SECONDS}s"
    kubectl("wait", "--for=create", f"node/{node.name}", waiting)
    _start_proxy(node)  # not before: it gives up when its node is long in coming
    kubectl("wait", "--for=condition=Ready", f"node/{node.name}", waiting)


def cut(node: Node) -> None:
    """Unplug the cable: everything on the node continues, and reaches no other machine."""
    _need_power(node)
    run("ip", "link", "set", node.on_machine, "down")


def join(node: Node) -> None:
    _need_power(node)
    run("ip", "link", "set", node.on_machine, "up")


def part(node: Node, pairs: list[tuple[str, str]]) -> None:
    """Drop all packets between these addresses at the node, and no others: no side gets an error, and
    connections outlive it. Without pairs, no packets are dropped.

    An address is a pod's, or the machine's, where the API server and DNS are.
    """
    _need_power(node)
    lost = ", ".join(f"{a} . {b}, {b} . {a}" for a, b in pairs)
    # Also between pods of one node: what its bridge forwards is filtered too (bridge-nf-call-iptables).
    table = f"""\
        table ip edl_parted {{
            set lost {{ type ipv4_addr . ipv4_addr; elements = {{ {lost} }}; }}
            chain forward {{ type filter hook forward priority -10; ip saddr . ip daddr @lost drop; }}
        }}"""
    rules = f"table ip edl_parted {{}}\ndelete table ip edl_parted\n{table if pairs else ''}\n"
    run("nsenter", f"--net=/run/netns/{node.on_machine}", "nft", "-f", "-", text=rules)


def _need_power(node: Node) -> None:
    if state(node) == "off":
        raise ClusterError(f"{node.name} is off (scripts/cluster node on {node.name})")


def power_on(node: Node) -> None:
    """Boot it, unless it is on."""
    if state(node) == "broken":
        power_off(node)
    if state(node) == "off":
        boot(node)


def restore(node: Node) -> None:
    """Switch the node on and join it to the network, from every state."""
    power_on(node)
    join(node)


def state(node: Node) -> str:
    """`on`, `off`, `cut off`, or `broken` when it lacks a part."""
    runs = {part.partition("/")[2] for part in marked().values() if part.startswith(f"{node.name}/")}
    if not runs:
        return "off"
    if runs != {"containerd", "kubelet", "kube-proxy"}:
        return "broken"
    link = Path(f"/sys/class/net/{node.on_machine}/flags")
    return "on" if link.exists() and int(link.read_text(), 16) & 1 else "cut off"


def power_off(node: Node) -> None:
    """Kill all that runs on the node, undo what its memory held. Also right when little or nothing is there.

    Raises:
        ClusterError: something could not be killed or unmounted.
    """
    # The cable first: a machine without power closes no connections, but a killed process does.
    run("ip", "link", "set", node.on_machine, "down", ok=False)
    # The kubelet first, or it would start again what is killed.
    kill(lambda: [pid for pid, part in marked().items() if part == f"{node.name}/kubelet"])
    kill(lambda: _processes_of(node))
    shims = [
        Path(file.read_text().removeprefix("unix://"))
        for file in node.directory.glob("run/*/k8s.io/*/address")
    ]
    for left in shims:
        left.unlink(missing_ok=True)
    _unmount(node.directory)
    run("ip", "link", "del", node.on_machine, ok=False)
    run("ip", "netns", "del", node.on_machine, ok=False)
    _remove_cgroup(node)
    for volatile in ("run", "runc"):
        shutil.rmtree(node.directory / volatile, ignore_errors=True)


def destroy(node: Node) -> None:
    """Power off, and the disk too."""
    power_off(node)
    # What the network plugins and the kubelet keep outside of the places they are given.
    results = Path("/var/lib/cni/results")
    for result in results.glob(f"{node.on_machine}-*-eth0"):
        sandbox = result.name.removeprefix(f"{node.on_machine}-").removesuffix("-eth0")
        (results / f"cni-loopback-{sandbox}-lo").unlink(missing_ok=True)
        result.unlink(missing_ok=True)
    for link in Path("/var/log/containers").glob("*"):
        if link.is_symlink() and os.readlink(link).startswith(f"{node.directory}/"):
            link.unlink()
    shutil.rmtree(node.directory, ignore_errors=True)


def _processes_of(node: Node) -> list[int]:
    found = {pid for pid, part in marked().items() if part.startswith(f"{node.name}/")}
    for cgroup in _cgroups(node):
        for folder, _, _ in os.walk(cgroup):  # which leaves out one that goes meanwhile
            with contextlib.suppress(OSError):
                pids = Path(folder, "cgroup.procs").read_text().split()
                found.update(int(pid) for pid in pids if not _is_dead(int(pid)))
    return sorted(found)


def _is_dead(pid: int) -> bool:
    """Return whether it has ended, also if its exit code was not read yet (a zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except OSError:
        return True


def _unmount(directory: Path) -> None:
    """Unmount all under the directory.

    Raises:
        ClusterError: something is still mounted: deleting the directory now might delete its contents.
    """

    def mounts() -> list[str]:
        targets = (line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines())
        plain = (target.encode().decode("unicode_escape") for target in targets)  # a space is \040 there
        return [target for target in plain if target.startswith(f"{directory}/")]

    for target in reversed(mounts()):
        run("umount", "--lazy", target, ok=False)
    if left := mounts():
        raise ClusterError(f"{left[0]} is still mounted (umount --lazy {left[0]} says why)")


# --- its network


def _plug_in(node: Node) -> None:
    """A link from the node's network namespace to the bridge, and the ways to all pods."""
    if Path(f"/run/netns/{node.on_machine}").exists():
        return
    name = node.on_machine
    run("ip", "netns", "add", name)
    run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    run("ip", "link", "set", name, "master", BRIDGE, "up")
    inside = [
        "link set lo up",
        f"link set eth0 address {node.mac}",
        f"addr add {node.address}/24 dev eth0",
        "link set eth0 up",
        f"route add default via {HOST}",
        *(f"route add {other.pods} via {other.address}" for other in NODES if other != node),
    ]
    run("ip", "-n", name, "-batch", "-", text="\n".join(inside))
    run("ip", "route", "replace", node.pods, "via", node.address)
    if node == NODES[0]:
        run("ip", "route", "replace", SERVICE_NET, "via", node.address)
    # Without the second, answers of a Service's pod to its neighbour on the same bridge would come from
    # the pod's address, and be refused.
    for switch in ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables"):
        if not Path(f"/proc/sys/{switch}").exists():
            raise CannotRun(f"the kernel has no {switch} (modprobe br_netfilter)")
        run("nsenter", f"--net=/run/netns/{name}", "sh", "-c", f"echo 1 >/proc/sys/{switch}")


# --- its cgroup: its own, since a kubelet removes everything in its cgroup that it does not know


def _cgroups(node: Node) -> list[Path]:
    """Its cgroup in each hierarchy of the machine: in the one, or with cgroup v1 in a dozen.

    Many machines with v1 have v2 beside it, without controllers; runc makes cgroups there, too.
    """
    if (CGROUPS / "cgroup.controllers").exists():
        hierarchies = [CGROUPS]
    else:
        lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        hierarchies = [Path(words[1]) for words in lines if words[2] in ("cgroup", "cgroup2")]
    return [hierarchy / node.on_machine for hierarchy in hierarchies]


def _make_cgroup(node: Node) -> None:
    for cgroup in _cgroups(node):
        cgroup.mkdir(exist_ok=True)
        if (CGROUPS / "cgroup.controllers").exists():
            for above in (cgroup.parent, cgroup):
                controllers = (above / "cgroup.controllers").read_text().split()
                try:
                    (above / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in controllers))
                except OSError as error:
                    raise CannotRun(f"cgroup controllers of {above} cannot be handed on: {error}") from error
        # In version 1, an empty cpuset accepts no process.
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (cgroup.parent / name).exists() and not (cgroup / name).read_text().strip():
                (cgroup / name).write_text((cgroup.parent / name).read_text())
        # On a busy machine, its pods together get as much as NODE_CPUS other processes, and not as one.
        for name, of_one in (("cpu.shares", 1024), ("cpu.weight", 100)):
            if (cgroup / name).exists():
                (cgroup / name).write_text(str(of_one * NODE_CPUS))


def _remove_cgroup(node: Node) -> None:
    end = time.monotonic() + 60  # many processes end in it, and the machine may be busy
    while True:
        for cgroup in _cgroups(node):
            for directory, _, _ in os.walk(cgroup, topdown=False):
                with contextlib.suppress(OSError):  # busy for a moment longer, or gone
                    os.rmdir(directory)
        if not any(cgroup.exists() for cgroup in _cgroups(node)):
            return
        if time.monotonic() > end:
            raise ClusterError(f"cgroup {node.on_machine} cannot be removed: {_processes_of(node)} are in it")
        time.sleep(0.02)


# --- its parts


def _start_containerd(node: Node) -> None:
    for host in (REGISTRY,):
        hosts = node.directory / "registries" / host / "hosts.toml"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text(
            f'server = "http://{host}"\n[host."http://{host}"]\n  capabilities = ["pull", "resolve"]\n'
        )
    plugins = [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "dataDir": str(node.directory / "addresses"),
                "ranges": [[{"subnet": node.pods}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    network = {"cniVersion": "1.0.0", "name": node.on_machine, "plugins": plugins}
    (node.directory / "cni" / "10-edl.conflist").write_text(json.dumps(network, indent=1))
    capabilities = next(
        int(line.split()[1], 16)
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff:")
    )
    may_raise = bool(capabilities >> CAP_SYS_RESOURCE & 1)
    config = node.directory / "containerd.toml"
    config.write_text(f"""\
version = 2
root = "{node.directory}/containerd"
state = "{node.directory}/run"
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]

[grpc]
  address = "{node.socket}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  stream_server_address = "127.0.0.1"
  disable_apparmor = true
  # Without CAP_SYS_RESOURCE, no process may ask for a better OOM score than its own: no pod would start.
  restrict_oom_score_adj = {str(not may_raise).lower()}
  # With all its mounts below the node's folder, they are found when the node goes.
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{node.directory}/cni"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{node.directory}/registries"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      Root = "{node.directory}/runc"
""")
    part = f"{node.name}/containerd"
    daemon = start(part, "containerd", "--config", config, netns=node.on_machine)

    def answers() -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(node.socket))
        return True

    wait(part, daemon, answers)
    for archive in parts.image_archives():
        run("ctr", "--address", node.socket, "--namespace", "k8s.io", "images", "import", archive)


def _start_kubelet(node: Node) -> None:
    cpus = os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
    if cpus < NODE_CPUS:
        raise CannotRun(f"each node is to have {NODE_CPUS} CPUs, and this machine has {cpus}")
    offered = min(NODE_MEMORY_GIB * 1024, max(memory - 2048, 1024) // len(NODES))
    resolv = node.directory / "resolv.conf"
    resolv.write_text("")  # names of the world are not known in here
    config = node.directory / "kubelet.json"
    described = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(PKI / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(PKI / f"{node.name}.crt"),
        "tlsPrivateKeyFile": str(PKI / f"{node.name}.key"),
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.on_machine}",
        "failCgroupV1": False,
        "failSwapOn": False,
        # Every node sees the whole machine. It offers a fixed part, so that a test knows what fills it;
        # this is bookkeeping of the scheduler's only, pods are held to their own limits.
        "systemReserved": {
            "cpu": str(cpus - NODE_CPUS),
            "memory": f"{memory - offered - EVICT_BELOW_MIB}Mi",
        },
        "enforceNodeAllocatable": [],
        "evictionHard": {
            "memory.available": f"{EVICT_BELOW_MIB}Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "clusterDomain": "cluster.local",
        "clusterDNS": [HOST],
        "resolvConf": str(resolv),
        # Signs of life often enough for control.GRACE_SECONDS.
        "nodeStatusUpdateFrequency": "10s" if SLOW else "2s",
        "nodeLeaseDurationSeconds": 40 if SLOW else 8,
        "syncFrequency": "10s",
        "serializeImagePulls": False,
        "podLogsDir": str(node.directory / "logs"),
        "volumePluginDir": str(node.directory / "plugins"),
    }
    config.write_text(json.dumps(described, indent=1))
    start(
        f"{node.name}/kubelet",
        parts.path("kubelet"),
        f"--config={config}",
        f"--kubeconfig={kubeconfig(node.name)}",
        f"--root-dir={node.directory / 'kubelet'}",
        f"--cert-dir={node.directory / 'kubelet' / 'pki'}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        netns=node.on_machine,
    )


def _start_proxy(node: Node) -> None:
    config = node.directory / "kube-proxy.json"
    described = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": node.name,
        "clusterCIDR": POD_NET,
        "bindAddress": node.address,
        "healthzBindAddress": f"{node.address}:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "clientConnection": {"kubeconfig": str(kubeconfig("kube-proxy"))},
        # These are the whole machine's: leave them as they are.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    config.write_text(json.dumps(described, indent=1))
    start(f"{node.name}/kube-proxy", parts.path("kube-proxy"), f"--config={config}", netns=node.on_machine)
