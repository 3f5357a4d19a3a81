# SPDX-License-Identifier: Apache-2.0
"""The names of a release's objects: the chart renders them, the programs take them from one module."""

from __future__ import annotations

import pytest

from edl.contract.ids import WorkerId
from edl.kubernetes.names import MASTER_PORT, Names
from tests.chart.conftest import Helm


@pytest.mark.parametrize(
    ("release", "sets", "full"),
    [
        ("edl", (), "edl"),
        ("digits", (), "digits-edl"),
        ("digits", ("nameOverride=trainer",), "digits-trainer"),
        ("a" * 50, (), ""),  # too long: cut, with a hash
    ],
)
def test_the_chart_and_the_programs_name_the_same_objects(
    helm: Helm, release: str, sets: tuple[str, ...], full: str
) -> None:
    rendered = helm.template(*sets, release=release, namespace="team")
    (container,) = rendered.master["spec"]["template"]["spec"]["containers"]
    env = {e["name"]: e.get("value", "") for e in container["env"]}
    names = Names(env["EDL_FULLNAME"])
    assert full in ("", names.fullname)
    assert {
        f"ConfigMap/{names.job}",
        f"ConfigMap/{names.status}",
        f"Deployment/{names.master}",
        f"Service/{names.master}",
        f"Lease/{names.lease}",
        f"Secret/{names.token}",
    } <= set(rendered.names())
    assert env["EDL_MASTER_ADDRESS"] == f"{names.master}.team.svc:{MASTER_PORT}"
    writable = {
        (rule["resources"][0], name)
        for rule in rendered.one("Role")["rules"]
        for name in rule.get("resourceNames", [])
    }
    assert {("configmaps", names.job), ("configmaps", names.status), ("leases", names.lease)} <= writable
    assert len(names.worker(WorkerId(10**9))) <= 63
