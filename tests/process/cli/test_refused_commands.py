# SPDX-License-Identifier: Apache-2.0
"""Commands that are refused in words, and commands that find what they need without importing it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from edl import __version__
from edl.contract import artifacts
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.errors import Unauthenticated
from edl.net.master_client import Client
from tests.support.jobs.commands import a_long_job, edl


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def test_scale_takes_the_directory_and_the_number_in_any_order_and_either_number_alone() -> None:
    for asked in (("job", "--servers", "3"), ("job", "3"), ("3", "job")):
        assert edl("scale", *asked).stderr.startswith("edl: job: "), asked
    assert "expected a number of workers ('job' is none), or --servers" in edl("scale", "job").stderr
    assert "neither 'job' nor 'other' is a number" in " ".join(edl("scale", "job", "other").stderr.split())


def test_local_commands_import_nothing_of_a_cluster() -> None:
    program = "import sys, edl.cli.app; sys.exit('lightkube' in sys.modules or 'httpx2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["digits", "--set", "training.epoch=3"],
            "training.epoch: unknown key; did you mean training.epochs?",
        ),
        (["digits", "--set", "workers=0.5"], "workers: invalid value 0.5 (expected an integer, at least 0"),
        (["digits", "-f", "nowhere.yaml"], "nowhere.yaml: cannot read"),
        (["./nowhere.py"], "file nowhere.py not found"),
        ([__file__], f"{__file__}: has no function model()."),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(arguments: list[str], words: str) -> None:
    done = edl("run", *arguments, "--output", "job")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("job").exists()


def test_an_output_directory_is_never_used_twice() -> None:
    Path("job").mkdir()
    Path("job/events.jsonl").touch()
    done = edl("run", "digits", "--output", "job")
    assert done.returncode == 1
    assert "already holds a job" in done.stderr


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "digit",
            "unknown model 'digit'; did you mean digits? (the zoo has counting, dcn_v2, deepfm, digits,",
        ),
        ("mine", "unknown model 'mine'; did you mean ./mine.py? (the zoo has"),
        ("nonsense", "unknown model 'nonsense'; a file is given by its path, such as ./my_model.py"),
        ("somewhere.else", "module 'somewhere.else' not found on the Python path"),
        ("package.model", "module 'package.model' not found on the Python path"),
        ("json.decoder.more", "module 'json.decoder.more' not found"),
    ],
)
def test_an_unknown_model_is_refused_before_anything_is_imported(model: str, words: str) -> None:
    Path("mine.py").touch()
    Path("package").mkdir()
    Path("package/__init__.py").write_text("raise SystemExit('this was imported')\n")
    done = edl("run", model, "--output", "job")
    assert done.returncode == 2
    assert f"edl: model.module: {words}" in done.stderr
    assert not Path("job").exists()


def test_a_dotted_module_is_found_without_importing_it() -> None:
    Path("package").mkdir()
    Path("package/__init__.py").write_text("raise SystemExit('this was imported')\n")
    Path("package/model.py").touch()
    code = "from edl.cli.shared import models; models.check('package.model'); models.check('json.decoder')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_zoo_is_listed_without_tensorflow() -> None:
    listed = edl("zoo", "list", check=True).stdout.splitlines()
    assert (
        "digits      Handwritten digits, 8x8 pixels: 1,797 real images that come with scikit-learn." in listed
    )
    code = "import sys; from edl.cli.shared import models; models.zoo(); sys.exit('keras' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version_and_a_status_without_a_job_say_what_to_do() -> None:
    assert edl("--version", check=True).stdout == f"edl {__version__}\n"
    none = edl("status")
    assert none.returncode == 2
    assert none.stderr.startswith(
        "edl: no job has been started on this machine; start one with `edl run MODEL`"
    )
    empty = edl("status", ".")
    assert empty.stderr == "edl: .: not the output directory of a job (master.json not found)\n"


def test_a_second_job_in_its_directory_and_strange_calls_do_not_disturb_a_job() -> None:
    with a_long_job() as (_, output):
        values = (output / "values.json").read_text()
        second = edl("run", "digits", "--output", str(output))
        assert second.returncode == 1
        assert second.stderr == "edl: job: another job runs in this directory; choose another --output\n"
        assert (output / "values.json").read_text() == values, "it has changed nothing"
        contact = artifacts.read_contact(output)
        assert oct((output / artifacts.CONTACT).stat().st_mode)[-3:] == "600"
        # Further calls: test_callers_without_token.py.
        with pytest.raises(Unauthenticated, match="token is missing or wrong"):
            Client(artifacts.Contact(contact.address, "guess", 0)).stop("no")
        with grpc.insecure_channel(contact.address) as channel:
            ours = (("authorization", f"Bearer {contact.token}"),)
            foreign = pb.FromWorker(run_id="another", hello=pb.Hello(worker=0, version="0.2.0"))
            with pytest.raises(grpc.RpcError) as refused:
                list(rpc.MasterStub(channel).Work(iter([foreign]), metadata=ours))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        before = Client(contact).status()["step"]
        deadline = time.monotonic() + 20
        while Client(contact).status()["step"] == before:
            assert time.monotonic() < deadline, "the job should go on undisturbed"
