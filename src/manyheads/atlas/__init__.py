"""An atlas of heads: what the heads of a model do over a corpus, not over one sentence.

    atlas = manyheads.atlas.record("shipped", ["docs"], "my-atlas")
    atlas = manyheads.atlas.open("my-atlas")
    atlas.to_pandas("heads").sort_values("induction")

corpus      text files, shards and windows
plans       the model, options and text of an atlas: its manifest
summaries   counts, sums, histograms and top lists of fixed size, and their merging
causal      weights under a causal mask, from a small part of the scores
measuring   the heads of a model on a batch of windows
recording   measures the shards, on one process or several, and merges them
tables      Parquet files, and the atlas that reads them
page        the atlas in a browser, or as an HTML file
"""

from __future__ import annotations

from manyheads.atlas.recording import record
from manyheads.atlas.tables import Atlas, open

__all__ = ["Atlas", "open", "record"]
