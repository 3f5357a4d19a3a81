"""The names of a release's objects. The chart's templates write the same ones; `tests/chart` compares them.

Everything begins with the release's full name, which the chart passes to the master as EDL_FULLNAME.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl.contract.ids import WorkerId

MASTER_PORT = 8500


@dataclass(frozen=True)
class Names:
    """Of one release.

    Args:
        fullname: the release's full name.
    """

    fullname: str

    @property
    def job(self) -> str:
        """ConfigMap: what the job is to be. The chart writes it; Events are about it."""
        return f"{self.fullname}-job"

    @property
    def status(self) -> str:
        """ConfigMap: how the job is. Only the master writes it."""
        return f"{self.fullname}-status"

    @property
    def master(self) -> str:
        """Deployment, Service, and the account of the master."""
        return f"{self.fullname}-master"

    @property
    def lease(self) -> str:
        """Lease: which master acts."""
        return f"{self.fullname}-master"

    @property
    def token(self) -> str:
        """Secret: what who talks to the master has to know."""
        return f"{self.fullname}-token"

    def worker(self, worker: WorkerId) -> str:
        """Pod of a worker."""
        return f"{self.fullname}-worker-{worker}"
