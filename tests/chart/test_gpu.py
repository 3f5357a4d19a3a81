# SPDX-License-Identifier: Apache-2.0
"""Workers with a GPU, as the chart renders them: the values file of chart/ci, which docs/gpu.md names."""

from __future__ import annotations

from tests.chart.conftest import Helm, Rendered

FILE = "gpu-values.yaml"


def test_a_gpu_worker_is_placed_on_the_tainted_pool_with_its_gpu_and_nccls_needs(
    rendered: dict[str, Rendered],
) -> None:
    spec = rendered[FILE].worker["spec"]
    [container] = spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    assert (spec["nodeSelector"], spec["runtimeClassName"]) == ({"accelerator": "yes"}, "nvidia")
    [volume] = [v for v in spec["volumes"] if v["name"] == "shm"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    environment = {e["name"]: e.get("value") for e in container["env"]}
    assert environment["NCCL_SOCKET_IFNAME"] == "=eth0" and environment["NCCL_IB_DISABLE"] == "1"
    assert environment["EDL_RING_INTERFACE"] == "eth0"
    assert rendered[FILE].values["worker"] == {"gpuMemory": "all"}, "each worker is alone on its GPU"


def test_no_other_pod_has_a_gpu(rendered: dict[str, Rendered]) -> None:
    for name, spec in rendered[FILE].pods():
        asked = [c.get("resources", {}).get("limits", {}) for c in spec["containers"]]
        assert any("nvidia.com/gpu" in limits for limits in asked) == name.startswith("worker"), name
    assert not any("nvidia.com/gpu" in str(spec) for _, spec in rendered[""].pods())


def test_workers_of_the_release_and_they_alone_reach_each_other_on_the_ports_that_nccl_chooses(
    rendered: dict[str, Rendered], helm: Helm
) -> None:
    release = rendered[FILE]
    policy = release.one("NetworkPolicy", "edl-worker")["spec"]
    workers = {"podSelector": policy["podSelector"]}
    assert policy["ingress"] == [{"from": [workers]}], "no ports are named, so all are allowed"
    locked = rendered["gitops-values.yaml"].one("NetworkPolicy", "edl-worker")["spec"]
    assert locked["egress"][0] == {"to": [{"podSelector": locked["podSelector"]}]}

    selected = workers["podSelector"]["matchLabels"].items()
    other = helm.template(release="other")
    assert selected <= release.worker["metadata"]["labels"].items()
    for pod in (release.master["spec"]["template"], release.one("Pod", "edl-test"), other.worker):
        assert not selected <= pod["metadata"]["labels"].items()
