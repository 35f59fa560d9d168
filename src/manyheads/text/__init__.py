"""Models that read text, and the findings, tables and pictures of `manyheads show`."""
