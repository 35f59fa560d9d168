"""Errors that adapters raise."""

from __future__ import annotations


class Unclear(Exception):
    """The error of a candidate that can't be imported, built or understood; it says why and how to fix it."""


class UnexpectedOutput(Exception):
    """The error of an output that has another type, shape or dtype than attention returns."""
