"""Makes pandas data frames, which is the only use of pandas here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from backstay_client.errors import MissingPackage
from backstay_client.reading.curve import TrainingCurve

__all__ = ["curve_frame", "frame", "needed"]


def needed(package: str, purpose: str, install: str) -> Any:
    """Returns the module of an optional package.

    Args:
        package: its name.
        purpose: what needs it.
        install: what to install, for pip.

    Raises:
        MissingPackage: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingPackage(f"{purpose} needs {package}: pip install {install}", name=package) from None


def frame(columns: Mapping[str, Sequence[Any]], index: str) -> Any:
    """Returns a `pandas.DataFrame`; `index` is the column that becomes its index."""
    pandas = needed("pandas", "a data frame", "pandas")
    return pandas.DataFrame(dict(columns)).set_index(index)


def curve_frame(curve: TrainingCurve) -> Any:
    """Returns a data frame with the steps as its index.

    Its columns are `loss`, the metrics that `loss` returned by their names, and ``evaluation/NAME`` for those that
    `evaluate` returned. A value that is not known is NaN.
    """
    pandas = needed("pandas", "job.metrics()", "pandas")
    steps = pandas.Index(curve.steps, name="step", dtype="int64")
    found = pandas.DataFrame({"loss": curve.loss, **curve.metrics}, index=steps)
    names = dict.fromkeys(name for metrics in curve.evaluations.values() for name in metrics)
    if not names:
        return found
    evaluated = sorted(curve.evaluations)
    columns = {
        f"evaluation/{name}": [curve.evaluations[step].get(name, float("nan")) for step in evaluated] for name in names
    }
    return found.join(pandas.DataFrame(columns, index=pandas.Index(evaluated, name="step", dtype="int64")), how="outer")
