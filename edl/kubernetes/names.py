"""The names of a release's objects. The chart's templates write the same ones; `tests/chart` compares them.

Everything begins with the release's full name, which the chart passes to the master as EDL_FULLNAME.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl.contract.ids import WorkerId

MASTER_PORT = 8500
JOB = "-job"


@dataclass(frozen=True)
class Names:
    """Of one release.

    Args:
        fullname: the release's full name.
    """

    fullname: str

    @classmethod
    def of_job(cls, job: str) -> Names | None:
        """Of the release whose job's ConfigMap has this name; None: no job's has."""
        return cls(job.removesuffix(JOB)) if job.endswith(JOB) else None

    @property
    def job(self) -> str:
        """ConfigMap: what the job is to be. The chart writes it; Events are about it."""
        return f"{self.fullname}{JOB}"

    @property
    def status(self) -> str:
        """ConfigMap: how the job is. Only the master writes it."""
        return f"{self.fullname}-status"

    @property
    def source(self) -> str:
        """ConfigMap: the text of the model that the run began with. Only the master writes it."""
        return f"{self.fullname}-source"

    @property
    def master(self) -> str:
        """Deployment, Service, and the account of the master."""
        return f"{self.fullname}-master"

    @property
    def lease(self) -> str:
        """Lease: which master acts."""
        return f"{self.fullname}-master"

    @property
    def servers(self) -> str:
        """StatefulSet and Service: the parameter servers."""
        return f"{self.fullname}-ps"

    @property
    def token(self) -> str:
        """Secret: what who talks to the master has to know."""
        return f"{self.fullname}-token"

    def worker(self, worker: WorkerId) -> str:
        """Pod of a worker."""
        return f"{self.fullname}-worker-{worker}"
