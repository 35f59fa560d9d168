"""Constructors get configurations of the class that they are written for, built small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import pytest
import torch
from torch import nn

from manyheads.checker import Unclear
from manyheads.checker.candidates.construct import (
    fill_arguments,
    fill_configuration,
    has_implementations,
    show_argument,
)
from manyheads.checker.isolation.candidate import Candidate
from manyheads.checker.isolation.describe import Argument, Configuration


@dataclass
class GPTConfig:
    n_embd: int = 768
    n_head: int = 12
    dropout: float = 0.0
    bias: bool = True
    n_layer: int = 12


class Settings:
    hidden_size = 768
    scale_attention: bool = True
    _attn_implementation = None

    def __init__(self, num_heads: int, **others: object) -> None:
        self.num_heads = num_heads
        for name, value in others.items():
            setattr(self, name, value)


class GPTParams(GPTConfig):
    pass


class Unannotated(nn.Module):
    def __init__(self, config, layer_idx=None):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx


class Annotated(nn.Module):
    def __init__(self, dim: int, is_causal: bool = False, cfg: Optional[ModelArgs] = None):  # noqa: UP045
        super().__init__()
        self.config = cfg


class ModelArgs(Settings):
    pass


class Modeled(Unannotated):
    pass


def build(target: type, **init: object) -> tuple[dict, nn.Module]:
    candidate = Candidate(target)
    arguments = fill_arguments(candidate.describe(), init)
    candidate.build(arguments)
    return arguments, candidate.instance


def test_without_an_annotation_it_is_the_configuration_in_the_file() -> None:
    """GPTConfig is only the base of another one, and Configuration is imported."""
    assert Candidate(Unannotated).describe().configurations["config"].name == "GPTParams"
    assert Candidate(Modeled).describe().configurations["config"].name == "ModelArgs"


def test_fields_in_the_table_are_small_and_others_keep_their_defaults() -> None:
    arguments, module = build(Unannotated, config={"n_layer": 3})
    assert show_argument(arguments["config"]).startswith("GPTParams(")
    assert vars(module.config) == {"n_embd": 24, "n_head": 4, "dropout": 0.1, "bias": True, "n_layer": 3}
    assert module.layer_idx == 0


def test_an_optional_configuration_is_filled_and_its_attributes_are_set() -> None:
    arguments, module = build(Annotated)
    assert isinstance(module.config, ModelArgs)
    assert (module.config.hidden_size, module.config.num_heads) == (24, 4)
    assert module.config._attn_implementation == "eager"
    assert "is_causal" not in arguments  # it says how to compute, where the implementation has a name
    assert has_implementations(Candidate(Annotated).describe())


def test_a_required_field_that_is_not_in_the_table_is_named() -> None:
    known = Configuration("Config", (Argument("colour", "positional", True, None, ""),))
    with pytest.raises(Unclear, match=r"Config needs 'colour'.*--init 'config=\{\"colour\": ...\}'"):
        fill_configuration("config", known, {}, None)
    assert fill_configuration("config", known, {"colour": 1}, None)["values"] == {"colour": 1}


def test_an_error_of_the_configuration_is_one_of_building() -> None:
    @dataclass
    class BadConfig:
        n_head: int = 1

        def __post_init__(self) -> None:
            raise ValueError("no")

    class Module(nn.Module):
        def __init__(self, config: BadConfig) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

    Module.__init__.__annotations__["config"] = BadConfig
    candidate = Candidate(Module)
    with pytest.raises(Exception, match=r"ValueError: no"):
        candidate.build(fill_arguments(candidate.describe(), {}))
