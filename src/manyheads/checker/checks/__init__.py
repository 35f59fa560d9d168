"""All checks, in the order of the report."""

from __future__ import annotations

# Importing a module registers its checks.
from manyheads.checker.checks import values, reach, weights, numerics, behavior, encodings  # isort: skip
from manyheads.checker.checks.registry import Check, is_random, run_checks

MODULES = (values, reach, weights, numerics, behavior, encodings)
__all__ = ["Check", "is_random", "run_checks"]
