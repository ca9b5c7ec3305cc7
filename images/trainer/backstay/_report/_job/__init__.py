"""Facts about the whole job on shard 0, besides its history.

`JobObserver` passes each decision of the coordinator to the parts below it. Each part returns its rows of the
`JobReport`, and the report is their sum.
"""

from __future__ import annotations

from ._curve import CurveRecord
from ._observer import JobObserver
from ._update_waits import UpdateWaits
from ._worker_reports import WorkerReports

__all__ = ["CurveRecord", "JobObserver", "UpdateWaits", "WorkerReports"]
