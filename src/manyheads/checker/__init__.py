"""Name the bug in somebody's attention."""
