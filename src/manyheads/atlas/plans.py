"""The plan of an atlas: its model, options and text, the content of the manifest that is written first."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manyheads.atlas.corpus import Corpus, readable
from manyheads.lm.checkpoint import disk_errors
from manyheads.storage import replacing
from manyheads.text import models
from manyheads.text.models import Model

FORMAT = "manyheads-atlas-1"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Layer:
    """A layer with self-attention.

    Attributes:
        path: The path of its module.
        heads: The number of heads.
    """

    path: str
    heads: int


@dataclass(frozen=True)
class Plan:
    """What an atlas is made of: the content of its manifest.

    Attributes:
        model: The name of the model.
        weights: The checksum of its weights.
        layers: Its layers.
        length: The largest number of tokens in a window.
        batch_size: The number of windows that are read at once.
        threads: The number of threads of each process.
        ablate: Whether the removal of each head is measured.
        versions: The versions of manyheads and PyTorch.
        text: The files and their shards.
    """

    model: str
    weights: str
    layers: tuple[Layer, ...]
    length: int
    batch_size: int
    threads: int
    ablate: bool
    versions: tuple[str, str]
    text: Corpus

    def pack(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        return {
            "format": FORMAT,
            "model": self.model,
            "weights": self.weights,
            "layers": [[layer.path, layer.heads] for layer in self.layers],
            "length": self.length,
            "batch_size": self.batch_size,
            "threads": self.threads,
            "ablate": self.ablate,
            "versions": list(self.versions),
            "text": self.text.pack(),
        }

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Read the manifest of a folder; raise ValueError if it can't be read as one."""
        path = folder / MANIFEST
        if not path.exists():
            raise FileNotFoundError(
                f"Expected the folder of an atlas, got {folder}, which has no {MANIFEST}. Make one with "
                "manyheads atlas."
            )
        with readable(path):
            content = path.read_bytes()
        try:
            plain = json.loads(content)
            if plain["format"] != FORMAT:
                plain = {}  # of a later version
            return cls(
                str(plain["model"]),
                str(plain["weights"]),
                tuple(Layer(str(name), int(heads)) for name, heads in plain["layers"]),
                int(plain["length"]),
                int(plain["batch_size"]),
                int(plain["threads"]),
                bool(plain["ablate"]),
                (str(plain["versions"][0]), str(plain["versions"][1])),
                Corpus.unpack(plain["text"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{path} isn't the manifest of an atlas of this version, or is damaged. Choose a different "
                "folder, or remove this one to start again."
            ) from None

    @property
    def identity(self) -> str:
        """The checksum of the plan, without names and paths."""
        plain = self.pack()
        del plain["model"]
        plain["text"]["files"] = [[size, checksum] for _, size, checksum in plain["text"]["files"]]
        return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=16).hexdigest()

    def check_model(self, model: Model) -> None:
        """Raise ValueError if a model hasn't the weights of the atlas."""
        if checksum(model) != self.weights:
            raise ValueError(
                f"Expected {self.model}, the model of the atlas, got {model.name}, which has other weights. "
                "Name the model that the atlas was recorded with."
            )

    def check_continues(self, earlier: Plan, out: Path) -> None:
        """Raise ValueError if the atlas in a folder was started with another model, text or options."""
        other = "Choose a different --out, or remove the folder to start again."
        if self.weights != earlier.weights or self.layers != earlier.layers:
            raise ValueError(
                f"{out} has an atlas of another model, {earlier.model}, than {self.model}. {other}"
            )
        if not self.text.has_text_of(earlier.text):
            raise ValueError(f"{out} has an atlas of another text than that of --text. {other}")
        for name in ("length", "batch_size", "threads", "ablate"):
            mine, theirs = getattr(self, name), getattr(earlier, name)
            if mine != theirs:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{out} has an atlas that was started with {option} {theirs}, got {mine}. {other}"
                )
        if self.versions != earlier.versions:
            names = "manyheads {} and PyTorch {}".format
            raise ValueError(
                f"The atlas in {out} was started with {names(*earlier.versions)}, got "
                f"{names(*self.versions)}, whose sums may be rounded differently. Finish it with those "
                "versions, or choose a different --out."
            )


def load_model(model: Any, with_logits: bool = False) -> Model:
    """Return a model that is given by name or loaded already, or the model of a plan.

    with_logits: Whether it must predict the next token.
    """
    if isinstance(model, Model):
        return model
    name = model.model if isinstance(model, Plan) else model
    return models.load(None if name in (None, models.SHIPPED) else name, with_logits)


def checksum(model: Model) -> str:
    """Return the checksum of a model's weights, with their names, dtypes and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write(path: Path, content: bytes) -> None:
    """Write a file that appears when it is complete; raise OSError if it can't be written."""
    with disk_errors(path), replacing(path) as file:
        file.write(content)
