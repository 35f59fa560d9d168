"""All checks, in the order of the report."""

from __future__ import annotations

# Importing a module registers its checks.
from manyheads.checker.checks import values  # isort: skip
from manyheads.checker.checks import reach  # isort: skip
from manyheads.checker.checks import weights  # isort: skip
from manyheads.checker.checks import numerics  # isort: skip
from manyheads.checker.checks import behavior  # isort: skip
from manyheads.checker.checks import encodings  # isort: skip
from manyheads.checker.checks.registry import CHECKS, Check, has_ended, is_random, run_checks

__all__ = [
    "CHECKS",
    "Check",
    "behavior",
    "encodings",
    "has_ended",
    "is_random",
    "numerics",
    "reach",
    "run_checks",
    "values",
    "weights",
]
