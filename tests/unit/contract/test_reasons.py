# SPDX-License-Identifier: Apache-2.0
"""The table of reasons: `edl.contract.reasons`."""

from __future__ import annotations

from pydantic import TypeAdapter

from edl.contract.reasons import Reason, Severity, Share
from edl.master.core import effects as ef


def test_a_reason_has_the_same_name_in_python_and_for_programs() -> None:
    assert [reason.name for reason in Reason] == [reason.value for reason in Reason]
    assert all(reason.isalnum() and reason[0].isupper() for reason in Reason), "as Kubernetes wants them"


def test_a_warning_never_waits_for_minor_events() -> None:
    assert {reason.share for reason in Reason if reason.severity is Severity.WARNING} == {Share.MAJOR}


def test_a_notice_comes_out_of_the_journal_as_it_went_in() -> None:
    adapter = TypeAdapter(ef.Notice)
    for reason in Reason:
        notice = ef.Notice(reason, "text")
        written = adapter.dump_json(notice)
        assert adapter.validate_json(written) == notice
        assert adapter.validate_json(written).reason is reason
