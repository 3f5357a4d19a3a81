# SPDX-License-Identifier: Apache-2.0
"""dlrover-run of DLRover 0.6.1 with torch 2.15, whose SubprocessHandler needs one more argument."""

from dlrover.trainer.torch.main import main
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
    SubprocessHandler,
)

SubprocessHandler.__init__.__defaults__ = (None,)
main()
