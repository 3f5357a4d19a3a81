# SPDX-License-Identifier: Apache-2.0
"""The first process of a container announces its exit in the termination message of the container."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edl.contract.exit_codes import ANNOUNCED, WorkerExit
from edl.exit_announcements import announced_in

ENDS = """
import os, sys
from edl import exit_announcements
from edl.trainer.runtime.termination import leave
exit_announcements.TERMINATION_MESSAGE = sys.argv[2]
{by}(int(sys.argv[1]))
"""


@pytest.mark.parametrize("by", ["leave", "os._exit"])
def test_only_an_exit_by_edls_own_code_is_believed(tmp_path: Path, by: str) -> None:
    message = tmp_path / "termination-log"
    for code in (*ANNOUNCED, WorkerExit.FAILED):
        message.write_text("")  # the kubelet makes it
        ended = subprocess.run([sys.executable, "-c", ENDS.format(by=by), str(int(code)), str(message)])
        assert ended.returncode == code
        believed = code if by == "leave" or code not in ANNOUNCED else WorkerExit.USER_CODE
        assert announced_in(message.read_text(), ended.returncode) == believed


def test_where_there_is_no_container_no_file_is_made(tmp_path: Path) -> None:
    message = tmp_path / "termination-log"
    ended = subprocess.run([sys.executable, "-c", ENDS.format(by="leave"), "75", str(message)])
    assert (ended.returncode, message.exists()) == (75, False)
