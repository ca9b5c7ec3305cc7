"""Faults by script: what a test, the chaos run or a user asks for happens at a step of its own choosing.

`reach` marks the places of the runtime where a fault can strike; without a script it is one comparison. The language
and what each fault does are in docs/faults.md.
"""

from ._injector import Injector, disk, install, on_wire, reach
from ._plan import ENV_FAULTS, Fault, parse

__all__ = ["ENV_FAULTS", "Fault", "Injector", "disk", "install", "on_wire", "parse", "reach"]
