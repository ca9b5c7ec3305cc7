"""Injects faults by scripts, in which a test, the chaos run or a user chooses what happens at which step.

A fault is injected at a point of `_instrument`. docs/faults.md describes the language and each fault.
"""

from ._injector import Injector, install
from ._plan import ENV_FAULTS, Fault, faults_of, parse

__all__ = ["ENV_FAULTS", "Fault", "Injector", "faults_of", "install", "parse"]
