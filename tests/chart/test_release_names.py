# SPDX-License-Identifier: Apache-2.0
"""Objects are named so that nothing collides, and no name is too long."""

from __future__ import annotations

import pytest

from tests.chart.conftest import CLASS, Helm, Refused, Rendered, labels


@pytest.mark.parametrize(
    ("release", "sets", "master"),
    [
        ("edl", [], "edl-master"),
        ("my-edl", [], "my-edl-master"),
        ("digits", [], "digits-edl-master"),
        ("digits", ["nameOverride=trainer"], "digits-trainer-master"),
        ("digits", ["fullnameOverride=x"], "x-master"),
        ("no", [], "no-edl-master"),
        ("42", [], "edl-42-master"),
        ("4edl", [], "edl-4edl-master"),
        ("a" * 36, [], "a" * 36 + "-edl-master"),
    ],
)
def test_the_objects_carry_the_releases_name(helm: Helm, release: str, sets: list[str], master: str) -> None:
    assert helm.template(*sets, release=release).service["metadata"]["name"] == master


def test_the_names_that_others_rely_on(rendered: dict[str, Rendered]) -> None:
    assert rendered[""].names() == [
        "ConfigMap/edl-job",
        "ConfigMap/edl-status",
        "Deployment/edl-master",
        "Lease/edl-master",
        "NetworkPolicy/edl-master",
        "NetworkPolicy/edl-worker",
        "PersistentVolumeClaim/edl-storage",
        "Pod/edl-test",
        f"PriorityClass/{CLASS}",
        "Role/edl-master",
        "RoleBinding/edl-master",
        "Secret/edl-token",
        "Service/edl-master",
        "ServiceAccount/edl-master",
        "ServiceAccount/edl-worker",
    ]


@pytest.mark.parametrize("namespaces", [("one", "one"), ("one", "two")])
@pytest.mark.parametrize("other", ["vision", "edl-2", "a" * 50 + "xyz"])
def test_two_releases_live_together(helm: Helm, namespaces: tuple[str, str], other: str) -> None:
    mine = {"edl", "edl-1", "a" * 50 + "xyy"}
    for release in mine:
        name = other if namespaces[0] == namespaces[1] else release
        one, two = (
            helm.template(release=r, namespace=n)
            for r, n in ((release, namespaces[0]), (name, namespaces[1]))
        )
        keys = [
            {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in r.objects}
            for r in (one, two)
        ]
        assert not keys[0] & keys[1]
        selectors = [r.service["spec"]["selector"] for r in (one, two)]
        assert selectors[0] != selectors[1] or namespaces[0] != namespaces[1]


def test_a_priority_class_is_of_one_release_and_of_one_value(helm: Helm) -> None:
    def classes(*sets: str, release: str = "edl", namespace: str = "team") -> tuple[str, int]:
        rendered = helm.template(*sets, release=release, namespace=namespace)
        name = str(rendered.one("PriorityClass")["metadata"]["name"])
        assert rendered.worker["spec"]["priorityClassName"] == name
        return name, rendered.one("PriorityClass")["value"]

    found = [
        classes(release="vision"),  # its objects are called vision-edl
        classes(namespace="team-vision"),
        classes("priorityClass.value=-20", namespace="team-vision"),
        classes("priorityClass.preemptionPolicy=PreemptLowerPriority", namespace="team-vision"),
    ]
    assert len({name for name, _ in found}) == 4
    assert [value for _, value in found] == [-10, -10, -20, -10]
    assert classes() == classes()
    assert classes("priorityClass.name=mine,priorityClass.value=-20") == ("mine", -20)


def test_a_pods_name_fits_into_its_host_name(helm: Helm) -> None:
    service = helm.template(release="e" * 53).service["metadata"]["name"]
    assert len(service.removesuffix("-master") + "-worker-1234567890") <= 63


@pytest.mark.parametrize(("release", "sets"), [("my.job", ()), ("4edl", ("nameOverride=2nd",))])
def test_a_name_that_no_service_can_have_is_refused_in_words(
    helm: Helm, release: str, sets: tuple[str, ...]
) -> None:
    with pytest.raises(Refused, match=f'"[^"]*{release}(-edl)?" cannot name the release\'s Service'):
        helm.template(*sets, release=release)
    assert helm.template("fullnameOverride=fine", release=release).service


def test_all_objects_carry_the_recommended_labels(rendered: dict[str, Rendered]) -> None:
    wanted = {*labels("", ""), *(f"app.kubernetes.io/{key}" for key in ("part-of", "version", "managed-by"))}
    for o in rendered[""].objects:
        assert o["metadata"]["labels"].keys() >= wanted | {"helm.sh/chart"}, o["kind"]
    worker = rendered[""].worker["metadata"]["labels"]
    assert worker.keys() >= wanted
    assert worker["app.kubernetes.io/managed-by"] == "edl-master"
    for o in rendered["gitops-values.yaml"].objects:
        assert o["metadata"]["labels"]["team"] == "vision", o["kind"]
        assert o["metadata"]["annotations"]["example.org/owner"] == "vision", o["kind"]
