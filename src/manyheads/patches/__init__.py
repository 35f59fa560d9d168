"""Where the patches of a picture are among the tokens of a model.

A vision transformer reads a class token and registers, then the patches of the picture, row by row. A
vision-language model reads the picture within its text, where the processor put a token for each patch or for
each block of patches that the model merges. `Patches` describes both; `find_patches` reads it from a model's
configuration and inputs.
"""

from __future__ import annotations

from manyheads.patches.finding import find_patches
from manyheads.patches.places import Located, Patches, check_grid, common, pack, select, unpack

__all__ = ["Located", "Patches", "check_grid", "common", "find_patches", "pack", "select", "unpack"]
