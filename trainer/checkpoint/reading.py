# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a job resumes from: find the newest whole one, check it, restore its state.

Promise: a checkpoint of a different run, model or data is refused before anything is changed. A store that is
away for a while is read again; a damaged checkpoint is passed over for an older one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from edl.checkpoints import SERVERS, CheckpointError, Loaded, Manifest, Store, check_values
from edl.config import Config
from edl.contract.artifacts import CLASSES
from edl.contract.layout import Layout
from edl.contract.ranges import RangeSet
from edl.errors import DataError, ModelError
from edl.trainer.agreement.epochs import MEMORY, Epochs, without_memory
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.model.state_owner import StateOwner
from edl.trainer.ps_client.client import PsClient
from edl.trainer.runtime.log import log
from edl.trainer.runtime.retry import tried_again
from edl.trainer.session.state import Session

T = TypeVar("T")
# Keys of a manifest's state.
BOUNDARY = "boundary"  # the ledger's step, if it is not the checkpoint's
TASK = "task"  # the epochs that the job was to train


class CheckpointReader:
    """The checkpoints that a worker can resume from.

    Args:
        store: where the checkpoints are.
        run_id: the run ID of the job.
        servers: the parameter servers, whose rows are in the checkpoints; None if the job has no servers.
        classes: the names of the labels' classes by number; empty if labels are numbers.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        learner: StateOwner,
        store: Store,
        run_id: str,
        servers: PsClient | None,
        classes: Sequence[str] = (),
    ):
        self._config, self._session, self._learner, self._store = config, session, learner, store
        self._run_id, self._servers = run_id, servers
        self._fingerprint, self._classes = "", list(classes)
        self._restored: Manifest | None = None  # the checkpoint that was restored
        self.forced: tuple[str, ...] = ()  # values that differ from the restored checkpoint's, in words

    @property
    def model(self) -> str:
        """The fingerprint of the model. It is computed once, when it is first needed."""
        self._fingerprint = self._fingerprint or self._learner.fingerprint()
        return self._fingerprint

    @property
    def attempt(self) -> str:
        """The attempt of the checkpoint that was restored last; empty if none was."""
        return self._restored.attempt if self._restored is not None else ""

    @property
    def whole(self) -> Iterator[tuple[int, str]]:
        """Step and attempt of all whole checkpoints, the newest first.

        Raises:
            CheckpointError: the store cannot be read.
        """
        return ((c.step, c.attempt) for c in reversed(self._store.checkpoints()) if not c.wrong())

    @property
    def restored_step(self) -> int:
        """The step of the checkpoint that was restored last; 0 if none was."""
        return self._restored.step if self._restored is not None else 0

    @property
    def restored_servers(self) -> int:
        """The number of servers' parts in that checkpoint."""
        state = self._restored.state if self._restored is not None else {}
        return int(state.get(SERVERS, {}).get("count", 0))

    @property
    def known(self) -> int:
        """The step of the newest completed checkpoint, damaged or not; 0 without a checkpoint.

        Raises:
            CheckpointError: the store cannot be read.
        """
        return max((c.step for c in self._store.checkpoints()), default=0)

    def newest(self, ours: Layout) -> tuple[int, Layout | None]:
        """Return the step of the newest checkpoint to resume from, and its data's layout; 0 if none exists.

        Args:
            ours: the data's layout, as this worker would choose it.

        Raises:
            DataError: the checkpoint is of different data.
            ConfigError: it is of a different run, or of incompatible values.
            ModelError: it is of a different model.
            CheckpointError: the store cannot be read.
        """
        return self._with_retries(lambda: self._newest(ours))

    def _newest(self, ours: Layout) -> tuple[int, Layout | None]:
        for checkpoint in reversed(self._store.checkpoints()):
            if not checkpoint.wrong():
                self._check(checkpoint.manifest)
                layout = Layout(**checkpoint.manifest.state["layout"])
                if layout.records != ours.records:
                    raise DataError(
                        f"the data have {ours.records:,} records, and the checkpoint of step "
                        f"{checkpoint.step:,} in {self._config.checkpoint.dir} was made with "
                        f"{layout.records:,}"
                    )
                return checkpoint.step, layout
        return 0, None

    def restore(self, expected: int) -> Ledger | None:
        """Restore the state of the newest whole checkpoint; None without such a checkpoint.

        Args:
            expected: the step of a checkpoint that is known to exist; 0 if none is.

        Raises:
            CheckpointError: none is whole, though one is expected.
            others: as for `newest`; nothing is changed then.
        """
        loaded: Loaded | None = self._with_retries(lambda: self._store.load_newest(log.warning))
        if loaded is None and expected:
            raise CheckpointError(
                f"{self._config.checkpoint.dir}: the checkpoint of step {expected:,} was written, and none "
                "is whole now. Nothing is trained anew: bring them back and resume, or begin another job"
            )
        if loaded is None:
            return None
        manifest = loaded.checkpoint.manifest
        self._check(manifest)
        found = [np.frombuffer(loaded.tensors[v.name].data, np.uint8) for v in without_memory(manifest)]
        remembered = loaded.tensors.get(MEMORY)
        epochs = _epochs(manifest, b"" if remembered is None else bytes(remembered.data))
        loaded.tensors.clear()
        self._learner.take_over(self._learner.prepared(found))
        self._restored = manifest
        try:  # damaged newer ones: the training that resumes here does not continue them
            self._store.supersede(manifest.step)
        except CheckpointError as error:
            log.warning(str(error))
        task = self._config.training.epochs
        epochs = epochs.going_on(task, int(manifest.state.get(TASK, task)))
        step = int(manifest.state.get(BOUNDARY, manifest.step))
        return Ledger(step, RangeSet.of(manifest.skipped), dict(manifest.bad), epochs=epochs)

    def _with_retries(self, read: Callable[[], T]) -> T:
        """Read from the store, with retries while it is away.

        The limit is half the startup timeout, so that this worker reports the cause before the master gives
        it up.
        """
        seconds = self._config.elastic.startup_timeout_seconds / 2
        return tried_again(read, seconds, self._session.warn, lambda: self._session.stopped)

    def _check(self, manifest: Manifest) -> None:
        where, step = self._config.checkpoint.dir, manifest.step
        forced = check_values(where, manifest, self._config, self._run_id)
        theirs = [(v.dtype, v.shape) for v in without_memory(manifest)]
        ours = [(d.dtype, d.shape) for d in self._learner.variable_specs()]
        if (there := manifest.state.get(CLASSES, self._classes)) != self._classes:
            raise DataError(
                f"the checkpoint of step {step:,} in {where} was trained with the classes {', '.join(there)}"
                f", and the data now have {', '.join(self._classes)}; give the former: edl.images(..., "
                "classes=[...])"
            )
        if manifest.model != self.model or theirs != ours:
            raise ModelError(
                f"the checkpoint of step {step:,} in {where} is of another model: its layers, variables, "
                "loss, optimizer or training.deterministic (with it, the processor's instructions) differ"
            )
        if (manifest.state.get(SERVERS) is None) != (self._servers is None):
            has, lacks = ("no rows", "has") if self._servers is not None else ("rows", "does not have")
            raise ModelError(
                f"the checkpoint of step {step:,} in {where} has {has} of parameter servers, and this job "
                f"{lacks} rows there: go on in the mode that it was made in"
            )
        self.forced = tuple(dict.fromkeys((*manifest.state.get("forced", ()), *forced)))


def _epochs(manifest: Manifest, memory: bytes) -> Epochs:
    """The history of a checkpoint's epochs; checkpoints of early versions of edl have none."""
    saved = manifest.state.get("epochs")
    return Epochs.unknown(manifest.epoch) if saved is None else Epochs.from_json(saved, memory)
