"""Starts in a pod what was submitted with `backstay.Client`.

python backstay_entry.py '{"function": "train", "args": {"rate": 0.1}}'

This file is in the job's ConfigMap, beside the modules. A ConfigMap has no folders, so the file `backstay_modules.json`
has the file of each module. This program uses the standard library only.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TABLE: dict[str, Any] = json.loads((HERE / "backstay_modules.json").read_bytes())
MODULES: dict[str, str | None] = TABLE["modules"]


class SubmittedModules:
    """Finds the modules of this folder, those of packages included."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Returns the module `name`, or None if it is not one of those that were submitted."""
        del path, target
        if name not in MODULES:
            return None
        file = MODULES[name]
        if file is None:  # a package without __init__.py
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = []
            return spec
        inner: list[str] | None = [] if file.endswith("__init__.py") else None
        return importlib.util.spec_from_file_location(name, HERE / file, submodule_search_locations=inner)


sys.meta_path.insert(0, SubmittedModules)


def main() -> None:
    """Call the function, or run the script."""
    call = json.loads(sys.argv[1])
    if call.get("folder"):
        os.chdir(call["folder"])
    if call.get("function"):
        getattr(importlib.import_module(TABLE["main"]), call["function"])(**call["args"])
        return
    script = str(HERE / str(MODULES[TABLE["main"]]))
    sys.argv[:] = [script, *call["args"]]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
