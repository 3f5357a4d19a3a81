# SPDX-License-Identifier: Apache-2.0
"""The control plane, DNS, the registry and kwok: processes in the machine's own network.

They listen on the bridge's address: a loopback address would not be valid in the Endpoints of
the `kubernetes` Service, and pods have to reach it.
"""

from __future__ import annotations

import base64
import json
import ssl
import sys
import urllib.request
from pathlib import Path
from typing import Any

from . import parts, provisioner
from .processes import LOGS, START_SECONDS, run, start, wait
from .settings import (
    ADMIN,
    API,
    CACHE,
    DNS_HEALTH,
    ETCD,
    ETCD_PEER,
    HOST,
    KUBERNETES,
    KWOK_HEALTH,
    NODES,
    REGISTRY,
    SERVICE_NET,
    SLOW,
    STATE,
)

PKI = STATE / "pki"
STORE = CACHE / "registry"  # stays when the cluster goes: what was pushed once is there next time
GRACE_SECONDS = 50 if SLOW else 12  # without a sign of life, a node is NotReady
AWAY_SECONDS = 300 if SLOW else 10  # and this much later its pods are given up

# What comes from a service account of a test is written down, so that a test can count a program's requests.
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}


def make_certificates() -> None:
    """A CA, a certificate for everyone, and a kubeconfig for each client. Elliptic keys: under a second.

    They have no more extensions than Kubernetes asks for, as in clusters that people have made by hand.
    """
    PKI.mkdir(mode=0o700)
    run(
        "openssl",
        "req",
        "-x509",
        *_key("ca"),
        "-out",
        PKI / "ca.crt",
        "-days",
        30,
        "-subj",
        "/CN=edl-cluster",
    )
    names = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    ]
    alternatives = ",".join(
        [f"IP:{HOST}", "IP:127.0.0.1", f"IP:{KUBERNETES}", *(f"DNS:{name}" for name in names)]
    )
    _certificate("apiserver", "/CN=kube-apiserver", alternatives)
    _certificate("apiserver-to-kubelet", "/O=system:masters/CN=apiserver-to-kubelet")
    _certificate("admin", "/O=system:masters/CN=admin")
    for client in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
        _certificate(client, f"/CN=system:{client}")
    _certificate("coredns", "/CN=edl:coredns")
    for node in NODES:
        subject = f"/O=system:nodes/CN=system:node:{node.name}"
        _certificate(node.name, subject, f"IP:{node.address},DNS:{node.name}")
    run("openssl", "genrsa", "-out", PKI / "accounts.key", 2048)
    run("openssl", "rsa", "-in", PKI / "accounts.key", "-pubout", "-out", PKI / "accounts.pub")
    ADMIN.write_bytes(kubeconfig("admin").read_bytes())
    ADMIN.chmod(0o600)


def _key(name: str) -> list[object]:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    return [*curve, "-nodes", "-keyout", PKI / f"{name}.key"]


def _certificate(name: str, subject: str, alternatives: str = "") -> None:
    uses = "keyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\n"
    if alternatives:
        uses += f"subjectAltName={alternatives}\n"
    (PKI / f"{name}.ext").write_text(uses)
    run("openssl", "req", *_key(name), "-out", PKI / f"{name}.csr", "-subj", subject)
    authority = ["-CA", PKI / "ca.crt", "-CAkey", PKI / "ca.key", "-CAcreateserial"]
    asked = ["-in", PKI / f"{name}.csr", "-extfile", PKI / f"{name}.ext", "-days", 30]
    run("openssl", "x509", "-req", *asked, *authority, "-out", PKI / f"{name}.crt")


def kubeconfig(user: str) -> Path:
    """A kubeconfig for the certificate of this name, whole in itself: it may be copied away."""

    def content(name: str) -> str:
        return base64.b64encode((PKI / name).read_bytes()).decode()

    file = PKI / f"{user}.conf"
    cluster = {"server": f"https://{API}", "certificate-authority-data": content("ca.crt")}
    credentials = {
        "client-certificate-data": content(f"{user}.crt"),
        "client-key-data": content(f"{user}.key"),
    }
    described = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "edl",
        "contexts": [{"name": "edl", "context": {"cluster": "edl", "user": user}}],
        "clusters": [{"name": "edl", "cluster": cluster}],
        "users": [{"name": user, "user": credentials}],
    }
    file.write_text(json.dumps(described, indent=1))
    return file


def kubectl(*words: object, text: str | None = None, ok: bool = True) -> str:
    return run(parts.path("kubectl"), f"--kubeconfig={ADMIN}", *words, text=text, ok=ok)


def apply(*objects: dict[str, Any]) -> None:
    kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def answers(url: str) -> bool:
    """Whether a server there answers with status 200.

    Raises:
        OSError: no server answers.
    """
    context = None
    if url.startswith("https:"):
        context = ssl.create_default_context(cafile=str(PKI / "ca.crt"))
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # from Python 3.13 on; our certificates are plain
        context.load_cert_chain(PKI / "admin.crt", PKI / "admin.key")
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    with opener.open(url, timeout=5) as response:
        return bool(response.status == 200)


def start_control_plane() -> None:
    etcd = start(
        "etcd",
        parts.path("etcd"),
        "--name=edl",
        f"--data-dir={STATE / 'etcd'}",
        "--unsafe-no-fsync",  # a cluster that has crashed is thrown away, never repaired
        f"--listen-client-urls=http://{ETCD}",
        f"--advertise-client-urls=http://{ETCD}",
        f"--listen-peer-urls=http://{ETCD_PEER}",
        f"--initial-advertise-peer-urls=http://{ETCD_PEER}",
        f"--initial-cluster=edl=http://{ETCD_PEER}",
    )
    # One after the other: the API server gives up without etcd, and the controllers after ten seconds
    # without the API server, which on a busy machine are not enough.
    wait("etcd", etcd, lambda: answers(f"http://{ETCD}/health"))
    policy = STATE / "audit-policy.json"
    policy.write_text(json.dumps(AUDIT_POLICY))
    apiserver = start(
        "kube-apiserver",
        parts.path("kube-apiserver"),
        f"--etcd-servers=http://{ETCD}",
        f"--bind-address={HOST}",
        f"--advertise-address={HOST}",
        f"--secure-port={API.partition(':')[2]}",
        f"--service-cluster-ip-range={SERVICE_NET}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--client-ca-file={PKI / 'ca.crt'}",
        f"--tls-cert-file={PKI / 'apiserver.crt'}",
        f"--tls-private-key-file={PKI / 'apiserver.key'}",
        f"--kubelet-certificate-authority={PKI / 'ca.crt'}",
        f"--kubelet-client-certificate={PKI / 'apiserver-to-kubelet.crt'}",
        f"--kubelet-client-key={PKI / 'apiserver-to-kubelet.key'}",
        # Nodes' names are in no DNS: logs and exec would fail.
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={PKI / 'accounts.pub'}",
        f"--service-account-signing-key-file={PKI / 'accounts.key'}",
        f"--default-not-ready-toleration-seconds={AWAY_SECONDS}",
        f"--default-unreachable-toleration-seconds={AWAY_SECONDS}",
        f"--audit-policy-file={policy}",
        f"--audit-log-path={LOGS / 'audit.log'}",
    )
    wait("kube-apiserver", apiserver, lambda: answers(f"https://{API}/readyz"))
    # With the default of 20 a start waits seconds for it.
    rate = [
        "--kube-api-qps=300",
        "--kube-api-burst=600",
    ]
    manager = start(
        "kube-controller-manager",
        parts.path("kube-controller-manager"),
        f"--kubeconfig={kubeconfig('kube-controller-manager')}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        *rate,
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={PKI / 'accounts.key'}",
        f"--root-ca-file={PKI / 'ca.crt'}",
        f"--cluster-signing-cert-file={PKI / 'ca.crt'}",
        f"--cluster-signing-key-file={PKI / 'ca.key'}",
        "--allocate-node-cidrs=false",
        f"--node-monitor-period={5 if SLOW else 1}s",
        f"--node-monitor-grace-period={GRACE_SECONDS}s",
    )
    start(
        "kube-scheduler",
        parts.path("kube-scheduler"),
        f"--kubeconfig={kubeconfig('kube-scheduler')}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        *rate,
    )
    # Pods are refused where the namespace has no account yet.
    account = f"https://{API}/api/v1/namespaces/default/serviceaccounts/default"
    wait("kube-controller-manager", manager, lambda: answers(account))
    apply(
        _binding("edl-kube-proxy", "system:node-proxier", "system:kube-proxy"),
        _binding("edl-coredns", "edl-coredns", "edl:coredns"),
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "edl-coredns"},
            "rules": [
                {
                    "apiGroups": [""],
                    "resources": ["services", "pods", "namespaces"],
                    "verbs": ["list", "watch"],
                },
                {
                    "apiGroups": ["discovery.k8s.io"],
                    "resources": ["endpointslices"],
                    "verbs": ["list", "watch"],
                },
            ],
        },
    )


def _binding(name: str, role: str, user: str) -> dict[str, Any]:
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }


def start_dns() -> None:
    """CoreDNS as a process; each kubelet names it to its pods."""
    corefile = STATE / "Corefile"
    corefile.write_text(f"""\
cluster.local:53 {{
  bind {HOST}
  errors
  kubernetes cluster.local {{
    kubeconfig {kubeconfig("coredns")}
    pods insecure
    ttl 1
  }}
}}
# The rest of the world does not exist: said at once, or clients would try again and again.
.:53 {{
  bind {HOST}
  health {DNS_HEALTH}
  template ANY ANY . {{
    rcode NXDOMAIN
  }}
}}
""")
    dns = start("coredns", parts.path("coredns"), "-conf", corefile)
    wait("coredns", dns, lambda: answers(f"http://{DNS_HEALTH}/health"))


def start_registry() -> None:
    STORE.mkdir(parents=True, exist_ok=True)
    described = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(STORE)}, "delete": {"enabled": True}},
        "http": {"addr": REGISTRY},
    }
    file = STATE / "registry.json"
    file.write_text(json.dumps(described))
    registry = start("registry", parts.path("registry"), "serve", file, OTEL_TRACES_EXPORTER="none")
    wait("registry", registry, lambda: answers(f"http://{REGISTRY}/v2/"))


def start_provisioner() -> None:
    """The default StorageClass, and what makes its volumes."""
    apply(provisioner.STORAGE_CLASS)
    start(provisioner.NAME, sys.executable, "-m", "machine.provisioner", parts.path("kubectl"))


def start_kwok(nodes: int) -> None:
    """Fake nodes f1..fN of 8 CPUs, on which pods only seem to run.

    They are tainted, so that only pods that tolerate `kwok.x-k8s.io/node=fake` come to them.
    """
    stages = STATE / "kwok-stages.yaml"
    source = parts.PROGRAMS["kwok"].directory / "stage"
    # kwok carries no stages, and ends when it is given none.
    wanted = ("node/fast", "node/heartbeat-with-lease", "pod/fast")
    files = [file for folder in wanted for file in sorted((source / folder).glob("*.yaml"))]
    stages.write_text("".join(f"---\n{file.read_text()}" for file in files if file.stem != "kustomization"))
    kwok = start(
        "kwok",
        parts.path("kwok"),
        f"--config={stages}",
        f"--kubeconfig={ADMIN}",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
        "--node-lease-duration-seconds=8",  # its default of 40 s is renewed too late for our grace
        f"--server-address={KWOK_HEALTH}",
    )
    wait("kwok", kwok, lambda: answers(f"http://{KWOK_HEALTH}/healthz"))
    resources = {"cpu": "8", "memory": "32Gi", "pods": "110", "ephemeral-storage": "100Gi"}
    apply(
        *(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": f"f{number}",
                    "annotations": {"kwok.x-k8s.io/node": "fake"},
                    "labels": {"type": "kwok", "kubernetes.io/hostname": f"f{number}"},
                },
                "spec": {"taints": [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}]},
                "status": {"allocatable": resources, "capacity": resources},
            }
            for number in range(1, nodes + 1)
        )
    )
    kubectl("wait", "--for=condition=Ready", "node", "-l", "type=kwok", f"--timeout={START_SECONDS}s")
