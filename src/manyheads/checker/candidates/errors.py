"""The errors between a candidate and its adapter."""

from __future__ import annotations


class Unclear(Exception):
    """A candidate can't be imported, built or understood; the message says why, and how to fix it."""


class UnexpectedOutput(Exception):
    """An output has another type, shape or dtype than attention returns."""
