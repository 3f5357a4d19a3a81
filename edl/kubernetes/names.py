# SPDX-License-Identifier: Apache-2.0
"""Names of a release's objects. The chart's templates use the same names; `tests/chart` compares them.

All names begin with the release's full name, which the chart passes to the master as EDL_FULLNAME.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl.contract.ids import WorkerId

MASTER_PORT = 8500
JOB = "-job"


@dataclass(frozen=True)
class Names:
    """The names of one release's objects.

    Args:
        fullname: the release's full name.
    """

    fullname: str

    @classmethod
    def of_job(cls, job: str) -> Names | None:
        """The names of the release whose job's ConfigMap is `job`; None: this is not a job's ConfigMap."""
        return cls(job.removesuffix(JOB)) if job.endswith(JOB) else None

    @property
    def job(self) -> str:
        """ConfigMap: the specification of the job. The chart writes it; Events refer to it."""
        return f"{self.fullname}{JOB}"

    @property
    def status(self) -> str:
        """ConfigMap: the status of the job. Only the master writes it."""
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
        """Lease: held by the acting master."""
        return f"{self.fullname}-master"

    @property
    def servers(self) -> str:
        """StatefulSet and Service: the parameter servers."""
        return f"{self.fullname}-ps"

    @property
    def token(self) -> str:
        """Secret: the token for calls to the master."""
        return f"{self.fullname}-token"

    def worker(self, worker: WorkerId) -> str:
        """Pod of a worker."""
        return f"{self.fullname}-worker-{worker}"
