"""Multi-head attention you can see through."""
