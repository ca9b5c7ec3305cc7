"""The operator watches TrainingJobs with Kopf, and brings the cluster to the state that `backstay_spec.plan` computes.

The pure planner decides what a job needs. This package connects the planner to a Kubernetes API server: it collects
what is observed, and sends the planned actions as API calls (promises O1-O8).
"""

import sys
from typing import Any, cast

# Kopf imports the `kubernetes` package where that is installed, to recognize its models, which are not used here. That
# takes 0.3 s of processor time and 11 MB. Only kubeconfigs with plug-ins need the package (see `access`).
if "kubernetes" not in sys.modules:
    cast("dict[str, Any]", sys.modules)["kubernetes"] = None
    try:
        import kopf  # noqa: F401
    finally:
        del sys.modules["kubernetes"]
