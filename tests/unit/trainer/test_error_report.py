# SPDX-License-Identifier: Apache-2.0
"""Errors of users' code, in words that can be sent: `edl.trainer.runtime.error_report`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from edl.contract.proto import edl_pb2 as pb
from edl.errors import DataError, ModelError, UserCodeError
from edl.trainer.model.user_import import import_file
from edl.trainer.runtime import error_report
from edl.trainer.session.state import Session


class Silent(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def told(error: BaseException) -> pb.Failed:
    """As the master gets it, over the wire; without the place in this file where it was raised."""
    sent: list[pb.FromWorker] = []
    Session(0, sent.append, threading.Event()).fail(raised(error))
    failed = pb.FromWorker.FromString(sent[0].SerializeToString()).failed
    failed.why = failed.why.removesuffix(f" ({error_report.error_location(error)})")
    return failed


OOM = tf.errors.ResourceExhaustedError
ON_A_GPU = [
    OOM(
        None,
        None,
        "Graph execution error:\n\nOOM when allocating tensor with shape[9,9] and type float on "
        "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc\n\t [[{{node MatMul}}]]",
    ),
    OOM(
        None, None, "{{function_node __wrapped__Mul_device_/device:GPU:0}} failed to allocate memory [Op:Mul]"
    ),
    OOM(None, None, "Out of memory while trying to allocate 256.0MiB."),
    tf.errors.InternalError(None, None, "No BLAS support for stream"),
    tf.errors.InternalError(
        None, None, "CUDA runtime implicit initialization on GPU:0 failed. Status: out of memory"
    ),
]
NOT_ON_A_GPU = [
    OOM(None, None, "OOM when allocating tensor with shape[9,9] on /device:CPU:0 by allocator cpu"),
    MemoryError("CUDA_ERROR_OUT_OF_MEMORY"),
    tf.errors.InternalError(None, None, "cuFFT: no plan for this GPU"),
]


@pytest.mark.parametrize("error", ON_A_GPU, ids=str)
def test_too_little_memory_on_a_gpu_is_told_with_the_values_to_change(error: Exception) -> None:
    wrapped = ModelError("the model's layer")
    wrapped.__cause__ = error
    for raised_error in (error, wrapped):
        failed = told(raised_error)
        assert failed.no_gpu_memory and not failed.fatal and not failed.mistake
        assert failed.why.startswith("the GPU's memory is not enough: ") and "\n" not in failed.why
        assert failed.why.endswith(error_report.GPU_MEMORY_ADVICE) and "function_node" not in failed.why
        assert str(error).splitlines()[-1] in failed.traceback


@pytest.mark.parametrize("error", NOT_ON_A_GPU, ids=str)
def test_other_errors_are_no_lack_of_memory_on_a_gpu(error: Exception) -> None:
    assert not told(error).no_gpu_memory


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("first.\nsecond"), "ValueError: first"),
        (ValueError("first\n\nsecond"), "ValueError: first"),
        (ValueError("two lines:\n\nthe second"), "ValueError: two lines: the second"),
        (ValueError("of two\nlines, and\nthree.\nMore."), "ValueError: of two lines, and three"),
        (ValueError(), "ValueError"),
        (ValueError("a lone \udcff surrogate"), r"ValueError: a lone \udcff surrogate"),
        (Silent(), "Silent: (its __str__ raises RuntimeError)"),
        (SystemExit(3), "the model's code has called sys.exit(3)"),
        (DataError("x.csv: line 3: no number\nsecond line"), "x.csv: line 3: no number\nsecond line"),
    ],
)
def test_an_error_is_told_in_words(error: BaseException, why: str) -> None:
    assert told(error).why == why


def test_what_a_layer_has_raised_is_told_and_not_only_where() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="one")])
    with pytest.raises(ValueError, match="Exception encountered") as given:
        model(np.ones((2, 4), np.float32))
    assert told(given.value).why == (
        "ValueError: Input 0 with name 'None' of layer 'one' is incompatible with the layer: expected axis "
        "-1 of input shape to have value 3, but received input with shape (2, 4) (in Sequential.call())"
    )
    assert "\x1b" not in told(given.value).traceback


def test_what_tensorflow_says_of_itself_is_left_out() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="function_node") as given:
        tf.ones((5, 5)) - tf.ones((5, 2))
    assert told(given.value).why == "InvalidArgumentError: Incompatible shapes: [5,5] vs. [5,2]"


def test_an_error_of_many_megabytes_is_told_in_short() -> None:
    failed = told(ValueError("x" * 70_000_000))
    assert len(failed.why) < 1.1 * error_report.MAX_WHY
    assert len(failed.traceback) < 1.1 * error_report.MAX_TRACEBACK
    assert "characters left out" in failed.why
    assert failed.traceback.startswith("Traceback")


def test_errors_in_our_own_words_need_no_traceback_but_those_of_users_code() -> None:
    assert told(DataError("x")).traceback == ""
    failed = told(UserCodeError("x"))
    assert failed.fatal
    assert "raise error" in failed.traceback


def test_causes_that_go_in_circles_are_told() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert told(one).why == "ValueError: one"


def called(text: str, where: Path) -> BaseException:
    """What the user's file raises, called through a library."""
    file = where / "mine.py"
    file.write_text(text)
    names: dict[str, Any] = {}
    try:
        exec(compile(text, str(file), "exec"), names)
        list(map(names["feed"], [1]))
    except BaseException as error:
        return error
    raise AssertionError


def test_the_users_file_and_line_are_told_also_of_a_cause_and_of_a_file_that_cannot_be_compiled(
    tmp_path: Path,
) -> None:
    inner = "import json\n\ndef feed(x):\n    return json.loads('{')\n"
    assert error_report.error_location(called(inner, tmp_path)) == "mine.py, line 4, in feed"
    wrapped = "def feed(x):\n    try:\n        1 / 0\n    except ZeroDivisionError as e:\n"
    wrapped += "        raise KeyError('no') from e\n"
    assert error_report.error_location(called(wrapped, tmp_path)) == "mine.py, line 3, in feed"
    torn = called("def feed(:\n", tmp_path)
    assert error_report.error_location(torn) == "mine.py, line 1"
    assert error_report.error_location(ValueError("raised by no code")) == ""


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("def feed(x): return 1 / 0", True),
        ("import no_such_module_of_mine", True),
        ("def feed(x): raise ValueError('shape')", True),
        ("def feed(x): open('/no/such/file')", False),
        ("def feed(x): raise MemoryError", False),
        ("class Mine(Exception): ...\ndef feed(x): raise Mine", False),
        ("def feed(x):\n    try: open('/no')\n    except OSError as e: raise ValueError(1) from e", False),
    ],
)
def test_a_mistake_of_the_code_is_told_from_what_may_pass(text: str, again: bool, tmp_path: Path) -> None:
    assert error_report.is_reproducible(called(text, tmp_path)) == again


def test_a_traceback_begins_with_the_users_code(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import seabornn\n")
    with pytest.raises(ImportError) as missing:
        import_file(path)
    assert missing.value.__traceback__ is not None
    error = missing.value.with_traceback(missing.value.__traceback__.tb_next)  # without this test's frame
    lines = error_report.format_traceback(error).splitlines()
    assert lines == [
        "Traceback (most recent call last):",
        f'  File "{path}", line 1, in <module>',
        "    import seabornn",
        "ModuleNotFoundError: No module named 'seabornn'",
    ]
