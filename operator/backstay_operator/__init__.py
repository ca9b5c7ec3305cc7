"""The operator: watches TrainingJobs with Kopf, and makes the cluster look as `backstay_spec.plan` says it should.

Nothing here decides what a job needs; the pure planner does. This package is the adapter between that function and a
Kubernetes API server: what is observed goes in, what is planned comes out as API calls (promises O1-O8).
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
