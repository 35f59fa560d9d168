"""Reads what a candidate is and how to call it."""
