"""Models that read text, and what `manyheads show` says and draws about their heads."""
