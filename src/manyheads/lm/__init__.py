"""A small causal language model that uses this library's attention: data, model, training, generation.

from manyheads import lm

model, tokenizer = lm.load()  # the model that ships with the package
print(lm.complete(model, tokenizer, "Return the").text)
"""

from manyheads.lm.checkpoint import load, save
from manyheads.lm.generate import Sampling, Text, complete, generate, stream
from manyheads.lm.model import Config, LanguageModel
from manyheads.lm.train import Options, train

__all__ = [
    "Config",
    "LanguageModel",
    "Options",
    "Sampling",
    "Text",
    "complete",
    "generate",
    "load",
    "save",
    "stream",
    "train",
]
