"""All checks, in the order of the report."""

# ruff: noqa: I001 (importing a module registers its checks, so the imports are in their order)

from __future__ import annotations

from manyheads.checker.checks import conventions, values, reach, weights, numerics
from manyheads.checker.checks import dropout, behavior, cache, encodings
from manyheads.checker.checks.registry import CONVENTIONS, Check, apply_strict, is_random, run_checks

MODULES = (conventions, values, reach, weights, numerics, dropout, behavior, cache, encodings)
__all__ = ["CONVENTIONS", "Check", "apply_strict", "is_random", "run_checks"]
