# SPDX-License-Identifier: Apache-2.0
"""`edl horovod`: horovodrun's flags, and lines of scripts that cannot run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edl.cli.app import app
from edl.compat.horovod import check as horovod_check
from edl.compat.horovod import command as horovod
from edl.compat.horovod import flags as horovod_flags
from edl.config import parse, values
from edl.errors import ConfigError

HOROVODRUN = """
--autotune --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --autotune-log-file
--autotune-steps-per-sample --autotune-warmup-samples --binding-args --blacklist-cooldown-range
--cache-capacity --check-build --config-file --cycle-time-ms --disable-cache --elastic-timeout
--fusion-threshold-mb --gloo --gloo-timeout-seconds --hierarchical-allgather
--hierarchical-allreduce --host-discovery-script --hostfile --hosts --jsrun --log-hide-timestamp
--log-level --log-with-timestamp --log-without-timestamp --max-np --max-num-proc --min-np
--min-num-proc --mpi --mpi-args --mpi-threads-disable --network-interface --network-interfaces
--no-autotune --no-hierarchical-allgather --no-hierarchical-allreduce --no-log-hide-timestamp
--no-mpi-threads-disable --no-stall-check --no-timeline-mark-cycles --no-torus-allreduce
--num-nccl-streams --num-proc --output-filename --prefix-output-with-timestamp --reset-limit
--slots-per-host --ssh-identity-file --ssh-port --stall-check --stall-check-shutdown-time-seconds
--stall-check-warning-time-seconds --start-timeout --tcp --thread-affinity --timeline-filename
--timeline-mark-cycles --torus-allreduce --verbose --version -H -cb -hostfile -i -np -p
-prefix-timestamp -v
"""  # its flags in version 0.28.1


def test_flags_become_values_of_the_job() -> None:
    flags = "-np 3 --min-np 2 --max-np 4 --start-timeout 90 --gloo -H localhost:2,127.0.0.1:2"
    command = "--set logLevel=error python -u train.py -np 5 --epochs 3"
    call = horovod_flags.parse(f"{flags} {command}".split())
    assert (call.script, call.arguments) == ("train.py", ("-np", "5", "--epochs", "3"))
    merged = values.load([], [*call.sets], [], [])
    config = parse(values.merge(merged, {"model": {"script": call.script}}))
    assert (config.workers, config.min_workers, config.max_workers) == (3, 2, 4)
    assert config.horovod.elastic and config.mode == "horovod" and not config.trains
    assert config.elastic.startup_timeout_seconds == 90 and config.log_level == "error"


def test_a_plain_script_has_a_ring_of_all_workers() -> None:
    config = parse(
        values.merge(
            values.load([], [*horovod_flags.parse(["-np", "2", "train.py"]).sets], [], []),
            {"model": {"script": "train.py"}},
        )
    )
    assert (config.workers, config.min_workers, config.max_workers) == (2, 2, 2)
    assert not config.horovod.elastic


def test_flags_of_the_engine_become_its_variables() -> None:
    sizes = "-np 2 --fusion-threshold-mb 32 --cycle-time-ms 2.5"
    others = "--legacy-keras --autotune --no-stall-check --network-interface eth0"
    assert horovod_flags.parse(f"{sizes} {others} train.py".split()).environment == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "TF_USE_LEGACY_KERAS": "1",
        "EDL_RING_INTERFACE": "eth0",
    }


@pytest.mark.parametrize(("flag", "why"), horovod_flags.REFUSED.items())
def test_flags_that_cannot_be_honoured_are_refused_by_name(flag: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        horovod_flags.parse(["-np", "2", flag, "x", "train.py"])
    assert str(refused.value) == f"edl horovod {flag}: {why}"


def test_flags_without_an_effect_are_ignored_with_the_reason() -> None:
    for flag, (count, why) in horovod_flags.IGNORED.items():
        call = horovod_flags.parse(["-np", "2", flag, *["7"] * count, "train.py", flag])
        assert (call.script, call.arguments) == ("train.py", (flag,))
        assert call.notes == (f"edl horovod {flag} is ignored: {why}",)
        elastic = flag == horovod_flags.DISCOVERY
        assert f"horovod.elastic={str(elastic).lower()}" in call.sets, "as with horovodrun"


def test_each_flag_of_horovodrun_is_known() -> None:
    known = horovod_flags.REFUSED | horovod_flags.IGNORED | horovod_flags.VALUES | horovod_flags.SWITCHES
    others = {"-v", "--version", "-cb", "--check-build", "-np", "--num-proc", "--min-np", "--min-num-proc"}
    others |= {"--max-np", "--max-num-proc", "-H", "--hosts", "--start-timeout", "--fusion-threshold-mb"}
    others |= {"--output-filename", "--gloo", "--verbose"}
    assert [flag for flag in HOROVODRUN.split() if flag not in known and flag not in others] == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train.py", "-np is missing"),
        ("-np 2", "expected a Python script"),
        ("-np 2 bash train.sh", "expected a Python script"),
        ("-np 2 python -m", "expected a Python script or module"),
        ("-np 2 python -c pass", "expected a Python script or module"),
        ("-np 2 env -i train.py", "expected a Python script or module"),
        ("-np 0 train.py", "0: expected a number, at least 1"),
        ("-np 2 --min-np 3 train.py", "-np 2: expected 3 (--min-np) to 2"),
        ("-np 2 -H server1:4 train.py", "-H server1"),
        ("-np 2 -H localhost:x train.py", "expected HOST:SLOTS"),
        ("-np 3 -H localhost:2 train.py", "-H has 2 slots"),
        ("-np 2 --unknown train.py", "--unknown"),
    ],
)
def test_mistakes_are_named(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        horovod_flags.parse(line.split())
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("line", "script", "is_module", "environment"),
    [
        ("python -m pkg.train --epochs 3", "pkg.train", True, {}),
        ("-- python -u train.py --epochs 3", "train.py", False, {}),
        ("env X=1 Y= python -m pkg.train --epochs 3", "pkg.train", True, {"X": "1", "Y": ""}),
        ("X=a=b train.py --epochs 3", "train.py", False, {"X": "a=b"}),
        ("-x HOME -x X=1 python3 train --epochs 3", "train", False, {"X": "1"}),
    ],
)
def test_commands_of_horovodrun_run(
    line: str, script: str, is_module: bool, environment: dict[str, str]
) -> None:
    call = horovod_flags.parse(["-np", "2", *line.split()])
    assert (call.script, call.is_module, call.environment) == (script, is_module, environment)
    assert call.arguments == ("--epochs", "3")


def test_a_module_runs_as_by_python_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("VALUE = 7")
    (tmp_path / "pkg" / "__main__.py").write_text(
        "from . import VALUE\nimport sys\nprint(VALUE, sys.argv[1:])"
    )
    monkeypatch.chdir(tmp_path)
    assert horovod._file_of("pkg") == tmp_path / "pkg" / "__main__.py"
    (script := tmp_path / "text.py").write_text(horovod.RUN_MODULE.format(module="pkg"))
    done = subprocess.run([sys.executable, str(script), "-a"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "7 ['-a']\n", done.stderr
    with pytest.raises(ConfigError, match=r"python -m pkg\.absent: no such module"):
        horovod._file_of("pkg.absent")


def test_keras_2_that_is_not_installed_is_named_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (script := tmp_path / "train.py").touch()
    monkeypatch.setattr("edl.compat.horovod.command.find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["horovod", "--legacy-keras", "-np", "2", str(script)])
    assert "pip install --no-deps tf-keras" in str(done.exception)


def test_texts_need_no_script() -> None:
    assert horovod_flags.parse(["--version"]).says == "0.28.1"
    assert "[X] TensorFlow" in horovod_flags.parse(["--check-build"]).says
    assert "-np N" in horovod_flags.parse(["--help"]).says


def test_values_must_fit_the_mode() -> None:
    for sets, words in (
        ("mode=horovod", "the script is missing"),
        ("mode=horovod,checkpoint.dir=/x", "the script writes its own checkpoints"),
    ):
        with pytest.raises(ConfigError) as refused:
            parse(values.load([], [sets], [], []))
        assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import tensorflow as tf\n\nwith tf.Session() as s:\n    pass",
            ":3: tensorflow.Session is of TensorFlow 1",
        ),
        (
            "import tensorflow as tf\nc = tf.compat.v1.Session()",
            ":2: tensorflow.compat.v1.Session is of TensorFlow 1",
        ),
        ("from tensorflow import placeholder", ":1: tensorflow.placeholder is of TensorFlow 1"),
        ("import horovod.tensorflow as hvd\nx = f(op=hvd.Adasum)", ":2: horovod.tensorflow.Adasum needs MPI"),
        ("import horovod.spark.keras", ":1: horovod.spark starts workers by Spark"),
        ("from horovod import ray", ":1: horovod.ray starts workers by Ray"),
        (
            "import horovod.torch as hvd",
            ":1: horovod.torch cannot be used: edl's Horovod is built for TensorFlow",
        ),
        ("import horovod\ndef main():\n    horovod.run(main, np=2)", ":3: horovod.run is not part of edl"),
        ("def (", "not a Python script"),
    ],
)
def test_lines_that_cannot_run_are_found_before_the_start(text: str, words: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    with pytest.raises(ConfigError) as refused:
        horovod_check.check(script)
    assert words in str(refused.value)


def test_code_behind_a_condition_is_not_judged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, horovod, tensorflow as tf, horovod.tensorflow as hvd\n"
        "op = hvd.Adasum if '--adasum' in sys.argv else hvd.Average\n"
        "if tf.__version__ < '2':\n    tf.Session()\n"
        "try:\n    import horovod.torch\nexcept ImportError:\n    pass\n"
        "if len(sys.argv) == 4:\n    horovod.run(print, np=2)\n"
    )
    horovod_check.check(script)
    with pytest.raises(ConfigError, match="No such file"):
        horovod_check.check(tmp_path / "absent.py")


def test_a_gpu_is_chosen_by_a_session_on_keras_2_only(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(
        "import tensorflow as tf\n"
        "tf.compat.v1.keras.backend.set_session(tf.compat.v1.Session(config=tf.compat.v1.ConfigProto()))\n"
    )
    horovod_check.check(script, legacy=True)
    with pytest.raises(ConfigError, match="or run it on Keras 2 \\(--legacy-keras\\)"):
        horovod_check.check(script)


SCRIPTS = Path(__file__).parents[2] / "models" / "horovod_scripts"


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.name)
def test_scripts_written_for_horovod_pass_the_check(script: Path) -> None:
    horovod_check.check(script)
