"""What can go wrong between a candidate and its adapter."""

from __future__ import annotations


class Unclear(Exception):
    """A candidate that can't be imported, built or understood: why, and how to fix it."""


class UnexpectedOutput(Exception):
    """An output of another type, shape or dtype than attention returns."""
