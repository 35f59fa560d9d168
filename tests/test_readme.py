"""What the README shows runs, and its two commands are the ones CI runs."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def names():
    """What the examples leave behind, run one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 2
    left: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), left)
    return left


def test_the_examples_run_and_give_the_shapes_they_say(names):
    assert tuple(names["out"].shape) == (1, 10, 512)
    assert tuple(names["amap"].shape) == (1, 8, 10, 10)


def test_token_by_token_gives_the_same_output(names):
    whole = names["layer"](names["x"], mask=names["Causal"]())
    assert (torch.cat(names["steps"], 1) - whole).abs().max().item() < 1e-5


def test_ci_runs_the_commands_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for words in re.findall(r"^(?:.*\()?.*readme \w+ '(.*?)'", script, re.M):
        assert words in README
    assert "readme tests 'python -m pytest'" in script
