# SPDX-License-Identifier: Apache-2.0
"""A check of a model file in one process: `edl check`.

    python -m edl.trainer.programs.check_model RESULT < VALUES

RESULT is the descriptor of a file that takes the report (edl/contract/model_report.py).

The check imports the module, reads a few records of each split, makes one training step and one evaluation,
and saves and loads the model, with the code that a worker runs at its start. There is no master and no ring.
Parts that do not depend on a failed part are tried all the same, so that all mistakes are reported at once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from edl import config as config_module
from edl.config import Config
from edl.contract.evaluation import FINAL, PREDICTED, VALIDATION, final_split
from edl.contract.model_report import FoundArray, FoundMistake, FoundSplit, ModelReport
from edl.contract.steps import Steps
from edl.contract.workers import remove_leftovers
from edl.data.formats.image_files import classes_of
from edl.data.objects.selected import columns_in
from edl.errors import EdlError
from edl.layers.row_location import keep_rows_elsewhere
from edl.trainer.agreement import control
from edl.trainer.agreement.metric_values import Value
from edl.trainer.callbacks.rules import accepted
from edl.trainer.embedding.local_rows import LocalRows
from edl.trainer.embedding.lookups import Lookups
from edl.trainer.evaluation.local_evaluation import evaluate
from edl.trainer.evaluation.metrics import EvaluationMetrics
from edl.trainer.export.preflight import run_preflight
from edl.trainer.model import mistakes, user_model
from edl.trainer.model.graphs import keep_xla_explicit
from edl.trainer.model.user_model import UserModel
from edl.trainer.records.batches import Batch
from edl.trainer.records.records import Records
from edl.trainer.records.splits import are_same, memorized, refuse_empty
from edl.trainer.runtime.error_report import error_place, format_error
from edl.trainer.runtime.watchdog import unwatched
from edl.trainer.start.build_inference import create_variables, know_classes, metrics_of, unknown_classes
from edl.trainer.start.build_learner import (
    TRIED_RECORDS,
    Alone,
    advised,
    explained,
    learner_of,
    model_of,
    ps_learner_of,
    samples_of,
)
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.own_step import OwnStepLearner


class Check:
    """The check of one model file with one set of values; `report` has what was found so far."""

    def __init__(self, config: Config):
        self.config, self.report = config, ModelReport(config.model.name)
        self._samples: dict[str, list[Batch]] = {}  # by split: several records, then one each
        self._readers: dict[str, Any] = {}

    def run(self) -> None:
        """Run all checks. The first failure ends them and is in the report."""
        began = time.monotonic()
        with contextlib.suppress(_Ended):
            self._run()
        self.report.seconds = time.monotonic() - began
        self.report.process_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def _run(self) -> None:
        config = self.config
        keras.utils.set_random_seed(config.training.seed)
        keep_xla_explicit()
        with self._part(None, ends=True):
            loaded = user_model.of_job(config)
        once = functools.cache(loaded.data)  # each split is read once
        for name in ("source", "function", "advice", "name_of"):
            setattr(once, name, getattr(loaded.data, name))
        module = replace(loaded, data=once)
        if config.servers or not config.is_decided:
            keep_rows_elsewhere()
        model: keras.Model | None = None
        with self._part(None):
            model = model_of(config, module, self._warn)
        with contextlib.suppress(EdlError):  # initFrom.path may be an address of the cluster
            know_classes(config, module)
        for split in self._splits():
            with self._part((module, "feed" if module.feed and split in self._readers else "data")):
                self._read(module, split)
        if module.callbacks is not None and config.trains:
            with self._part(None):
                accepted(module.callbacks(), config, self._warn)
        if model is None or self.report.mistakes:
            return
        with self._part((module, "model"), ends=True):
            try:
                if config.trains:
                    self._train(module, model)
                else:
                    self._infer(module, model)
            finally:
                self._describe(model)

    def _splits(self) -> Sequence[str]:
        config = self.config
        if config.mode == "predict":
            return (PREDICTED,)
        if not config.trains:
            return (config.evaluation.split,)
        return ("train", VALIDATION, FINAL) if config.evaluation.split == VALIDATION else ("train", FINAL)

    def _read(self, module: UserModel, split: str) -> None:
        """Read a few records of a split, and make a batch of them.

        Raises:
            EdlError: it has no records, or those are invalid.
        """
        config = self.config
        reader = module.reader(split)
        if reader is None or (not config.trains and not len(reader)):
            if not config.trains or split == config.evaluation.split == FINAL:
                raise EdlError(
                    f"{module.name}: {module.source(split)} has no records, which the job needs ({split!r})"
                )
            return
        if config.trains and (told := module.advice):
            self._warn(told)
        if split == FINAL and VALIDATION in self._readers and are_same(reader, self._readers[VALIDATION]):
            return  # data() returns its held-out records for every split other than "train"
        refuse_empty(len(reader), split, module.name, config.data.allow_empty)
        self._readers[split] = reader
        train = self._readers["train"] if split != "train" and "train" in self._readers else None
        if train is not None and (told := memorized(train, reader, module.source(split))):
            self._warn(told)
        if told := unknown_classes(config, module, reader):
            self._warn(told)
        feed, transform = module.feed_of(split), module.transform_of(split)
        lenient = config.data.max_bad_records > 0
        records = Records(reader, feed, module.name, lenient=lenient, transform=transform)
        with self._part((module, "feed" if module.feed else "data")):
            self._samples[split] = batches = samples_of(records)
            arrays = _arrays(batches[0]) if batches else ()
            names = classes_of(reader), columns_in(reader) if feed is None else ()
            self.report.splits.append(FoundSplit(split, module.source(split), len(reader), arrays, *names))

    def _train(self, module: UserModel, model: keras.Model) -> None:
        """Make a training step and an evaluation.

        Raises:
            ModelError: the model cannot be trained over a ring.
            Mistake: the loss is not finite, or a common mistake is behind an error.
            EdlError: the evaluation would fail, or the model cannot be written in one of its formats.
        """
        config, samples = self.config, self._samples["train"]
        training = config.training
        self.report.steps = Steps(len(self._readers["train"]), training.batch_size).per_epoch
        learner: KerasLearner | OwnStepLearner
        with advised(config, model), explained(module, model, samples, training.batch_size):
            if config.asynchronous:
                learner = ps_learner_of(model, samples, training, self._warn)
            else:
                learner = learner_of(model, samples, Alone(), training, self._warn)
            if not samples:
                return
            batch = samples[0]
            result = learner.allreduce_step(batch, control.write(0), 0, 0, len(batch))
            learner.apply(result)
        self.report.loss = result.agreed.loss
        if result.agreed.nonfinite or not math.isfinite(result.agreed.loss):
            mistake = mistakes.not_finite(module, batch)
            raise mistake
        self.report.state_bytes = learner.nbytes
        with learner.whole():
            run_preflight(
                model,
                module,
                unwatched,
                config.data.allow_empty,
                self._warn,
                True,
                config.export.further,
                batch.x,
            )
            final = final_split(config.evaluation.split, {s: len(r) for s, r in self._readers.items()})
            if (held_out := self._readers.get(final)) is not None and len(held_out):
                EvaluationMetrics(model, batch, self._warn, learner.lookups, learner.others)
                few = [(0, min(TRIED_RECORDS, len(held_out)))]
                found = evaluate(model, module, held_out, unwatched, few, final)
                self.report.metrics = _numbers(found)

    def _infer(self, module: UserModel, model: keras.Model) -> None:
        """Evaluate the model, or predict with it."""
        (samples,) = self._samples.values()
        if not samples:
            return
        with explained(module, model, samples, self.config.evaluation.batch_size):
            create_variables(model, samples[0])
            lookups = Lookups(model, trained=False)
            lookups.rows = LocalRows(lookups.tables)
            if self.config.mode == "evaluate":
                metrics = metrics_of(model, samples[0], lookups)
                totals = metrics.added(samples[0]).astype(np.float64)
                self.report.metrics = _numbers(metrics.results(totals))

    def _describe(self, model: keras.Model) -> None:
        report = self.report
        report.parameters = sum(_size(v) for v in model.weights)
        report.trained = sum(_size(v) for v in model.trainable_weights)
        report.optimizer = type(model.optimizer).__name__ if getattr(model, "optimizer", None) else ""
        outputs = [t for t in keras.tree.flatten(getattr(model, "outputs", None) or []) if t is not None]
        report.outputs = [
            FoundArray(f"output {t.name}" if outputs[1:] else "output", str(t.dtype), tuple(t.shape[1:]))
            for t in outputs
        ]

    def _warn(self, text: str) -> None:
        if text not in self.report.warnings:
            self.report.warnings.append(text)

    @contextlib.contextmanager
    def _part(self, about: tuple[UserModel, str] | None, ends: bool = False) -> Iterator[None]:
        """Try a part of the check; inside this context, an error is reported as a mistake.

        Args:
            about: the module and the function that an error without a line of the user's code is about.
            ends: nothing can be tried after an error.

        Raises:
            _Ended: an error was reported, and `ends` is true.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            place = error_place(error)
            if place is None and about is not None:
                place = mistakes.place_of(*about)
            why, cause = format_error(error), ""
            if isinstance(error, mistakes.Mistake):
                why, cause = error.why, error.cause
            why = why.removeprefix(f"{self.report.model}: ")
            found = FoundMistake(why, *(place or ("", 0, "")), cause)
            lines = {(m.file, m.line) for m in self.report.mistakes if m.file}
            if (found.file, found.line) not in lines and found not in self.report.mistakes:
                self.report.mistakes.append(found)
            for more in error.also if isinstance(error, mistakes.Mistake) else ():
                text = more.why.removeprefix(f"{self.report.model}: ")
                self.report.mistakes.append(FoundMistake(text, *(more.place or ("", 0, ""))))
            if ends:
                raise _Ended from error


class _Ended(BaseException):
    """The check cannot go on."""


def _arrays(batch: Batch) -> tuple[FoundArray, ...]:
    found = []
    for name, tree in (("features", batch.x), ("labels", batch.y), ("weights", batch.weights)):
        for path, array in keras.tree.flatten_with_path(tree):
            if array is not None:
                inner = "".join(f"[{key!r}]" for key in path)
                kind = getattr(array.dtype, "name", str(array.dtype))
                found.append(FoundArray(f"{name}{inner}", kind, tuple(array.shape[1:])))
    return tuple(found)


def _numbers(results: Mapping[str, Value]) -> dict[str, float]:
    """The results that are single numbers."""
    return {name: float(value) for name, value in results.items() if isinstance(value, int | float)}


def _size(variable: Any) -> int:
    return int(np.prod(variable.shape))


def main() -> int:
    """Check the model of the values on standard input, and return the process's exit code."""
    remove_leftovers(os.environ)
    check = Check(config_module.parse(json.load(sys.stdin)))
    check.run()
    with open(int(sys.argv[1]), "w", encoding="utf-8") as result:
        result.write(check.report.to_json())
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of TensorFlow and of the user's module have nothing left to report
