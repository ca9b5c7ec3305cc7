"""Runs the pod of a job: reads what the pod is, and connects the lifecycle of its role with its reports and ports.

`run` is the call of `train` in a pod. A `PodRunner` makes a lifecycle (`_roles`) and its observers (`_report`), and
opens the HTTP port. `initialize` connects the pods of a rank earlier. `fail` ends a pod because of an exception.
"""

from __future__ import annotations

from ._lifecycles import PodRunner
from ._run import fail, initialize, run

__all__ = ["PodRunner", "fail", "initialize", "run"]
