# SPDX-License-Identifier: Apache-2.0
"""Names, addresses and places of the test cluster, each said once.

There is one cluster per machine, since bridges, routes and cgroups belong to the machine: so its
state has one fixed place, where every `down` finds it. What is built lies in the cache.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]  # tools/test_cluster
CACHE = Path(os.environ["EDL_CACHE"]) / "cluster"  # scripts/dev/lib.sh says where, and what is quick to make
QUICK = Path(os.environ["EDL_QUICK_CACHE"]) / "cluster"
STATE = Path("/var/lib/edl-cluster")
LOCK = Path("/run/edl-cluster.lock")
ADMIN = STATE / "admin.conf"
BIN = STATE / "bin"  # what a person or a test types: kubectl, helm

BRIDGE = "edl0"  # the nodes' network; the machine forwards nothing, so nothing leaves it
# A fixed MAC address: a bridge would else take that of one of its ports, and a different one when a node
# is removed. For up to half a minute, machines that knew the old one could not reach it.
BRIDGE_MAC = "02:ed:00:00:00:01"
NODE_NET = "10.231.0.0/24"
HOST = "10.231.0.1"  # where the control plane, DNS and the registry listen
POD_NET = "10.244.0.0/16"
SERVICE_NET = "10.96.0.0/16"
KUBERNETES = "10.96.0.1"  # the Service of the API server: the first of its net
API = f"{HOST}:6443"
REGISTRY = f"{HOST}:5000"
ETCD, ETCD_PEER = "127.0.0.1:23790", "127.0.0.1:23791"  # not etcd's own ports, someone may use them
DNS_HEALTH = f"{HOST}:8081"
KWOK_HEALTH = "127.0.0.1:10347"

# Nodes are given up by Kubernetes' default times, which no test could wait for: to measure what they cost.
SLOW = os.environ.get("EDL_CLUSTER_TIMES") == "default"
NODE_CPUS = 2  # allocatable, on any machine: "four workers of 500m fill a node"
NODE_MEMORY_GIB = 8  # at most; less where the machine has less


class ClusterError(Exception):
    """Something went wrong; the text says what, and what to do."""


class CannotRun(ClusterError):
    """This machine lacks what a cluster needs (root, a tool): tests are skipped for it, not failed."""


@dataclass(frozen=True)
class Node:
    """One real node: a network namespace, a cgroup and a folder, all of its own."""

    number: int

    @property
    def name(self) -> str:
        return f"n{self.number}"

    @property
    def address(self) -> str:
        return f"10.231.0.{10 + self.number}"

    @property
    def mac(self) -> str:
        return f"02:ed:00:00:01:{self.number:02x}"

    @property
    def pods(self) -> str:
        return f"10.244.{self.number}.0/24"

    @property
    def on_machine(self) -> str:
        """Its namespace, cgroup and link, as the machine calls them."""
        return f"edl-{self.name}"

    @property
    def directory(self) -> Path:
        return STATE / self.name

    @property
    def socket(self) -> Path:
        return self.directory / "run" / "containerd.sock"


NODES = (Node(1), Node(2))


def node(name: str) -> Node:
    """The node of this name.

    Raises:
        ClusterError: no range is free.
    """
    for candidate in NODES:
        if candidate.name == name:
            return candidate
    raise ClusterError(f"there is no node {name!r}; the nodes are {', '.join(n.name for n in NODES)}")


def say(text: str) -> None:
    print(f"cluster: {text}", file=sys.stderr, flush=True)
