"""Adapters: find the kind of a candidate and how to call it."""
