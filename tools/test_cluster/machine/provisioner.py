# SPDX-License-Identifier: Apache-2.0
"""The volumes of the default StorageClass: a folder for each claim, on the node of its first pod.

They are ReadWriteOnce only, as the block storage of clouds: a pod on the other node cannot mount them. A
claim that asks for ReadWriteMany stays pending, with an Event that says why.

    python -m machine.provisioner KUBECTL     runs until it is killed
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .settings import ADMIN, STATE

NAME = "provisioner"
CLASS = "local"
PROVISIONER = "edl.dev/folder"
FOLDERS = STATE / "volumes"
SELECTED = "volume.kubernetes.io/selected-node"
STORAGE_CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": PROVISIONER,
    "reclaimPolicy": "Delete",
    "volumeBindingMode": "WaitForFirstConsumer",
}

Object = dict[str, Any]


def claimed(claim: Object) -> list[Object]:
    """Return what to create for a claim: its volume, or an Event with the reason; empty if none is due."""
    meta, spec = claim["metadata"], claim["spec"]
    node = meta.get("annotations", {}).get(SELECTED)
    due = claim.get("status", {}).get("phase") == "Pending" and not spec.get("volumeName") and node
    if spec.get("storageClassName") != CLASS or not due:
        return []
    of = {key: meta[key] for key in ("name", "namespace", "uid")} | {
        "kind": claim["kind"],
        "apiVersion": "v1",
    }
    name = f"pvc-{meta['uid']}"
    if spec["accessModes"] != ["ReadWriteOnce"]:
        modes = ", ".join(spec["accessModes"])
        return [
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{name}-{meta['resourceVersion']}", "namespace": meta["namespace"]},
                "type": "Warning",
                "reason": "ProvisioningFailed",
                "message": f"{PROVISIONER} gives ReadWriteOnce only, and the claim asks for {modes}",
                "involvedObject": of,
                "source": {"component": PROVISIONER},
            }
        ]
    hostname = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {
                "name": name,
                "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER},
            },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": {"storage": spec["resources"]["requests"]["storage"]},
                "claimRef": of,
                "local": {"path": str(FOLDERS / name)},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [hostname]}]}},
                "persistentVolumeReclaimPolicy": "Delete",
                "storageClassName": CLASS,
            },
        }
    ]


class Provisioner:
    """Gives claims their volumes, and removes those that are released."""

    def __init__(self, kubectl: str):
        self._kubectl = [kubectl, f"--kubeconfig={ADMIN}"]

    def run(self) -> None:
        threading.Thread(target=self._each, args=("pv", self._released)).start()
        self._each("pvc", self._provide)

    def _each(self, kind: str, act: Callable[[Object], None]) -> None:
        while True:  # a watch ends after some minutes
            for found in self._watch(kind):
                act(found)

    def _watch(self, kind: str) -> Iterator[Object]:
        """The objects of a kind in all namespaces, and each that changes."""
        command = [*self._kubectl, "get", kind, "-A", "--watch", "-o", "json"]
        decoder, text = json.JSONDecoder(), ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                text += line
                if line.startswith("}"):  # the end of an object
                    yield decoder.decode(text)
                    text = ""

    def _provide(self, claim: Object) -> None:
        for made in claimed(claim):
            if made["kind"] == "PersistentVolume":
                folder = Path(made["spec"]["local"]["path"])
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o777)
            # It may exist: the claim has changed before it was bound.
            subprocess.run(
                [*self._kubectl, "create", "-f", "-"], input=json.dumps(made), text=True, check=False
            )

    def _released(self, volume: Object) -> None:
        ours = volume["spec"].get("storageClassName") == CLASS
        if ours and volume.get("status", {}).get("phase") == "Released":
            name = volume["metadata"]["name"]
            subprocess.run([*self._kubectl, "delete", "pv", name, "--wait=false"], check=False)
            shutil.rmtree(FOLDERS / name, ignore_errors=True)


if __name__ == "__main__":
    Path("/proc/self/comm").write_text(NAME)  # the name by which `scripts/cluster status` finds its parts
    Provisioner(sys.argv[1]).run()
