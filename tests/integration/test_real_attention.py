"""Attention of real libraries passes, with the commands that docs/checker.md shows.

They need libraries that the everyday tests don't: `.ci/run` installs them before it runs the full tier.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checker.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Real classes")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| ([^|]+) \| `manyheads (check [^|]+)` \|", TABLE, re.M)
LIBRARIES = ("transformers", "timm", "x_transformers", "labml_nn")
LISTED = (  # what the page must show
    "MultiheadAttention BertSelfAttention BertAttention GPT2Attention LlamaAttention MistralAttention "
    "Gemma2Attention Qwen3Attention T5Attention ViTAttention WhisperAttention GptOssAttention timm "
    "x_transformers labml_nn nanogpt mingpt torchtune"
)


def test_the_page_lists_the_classes():
    commands = " ".join(command for _, command in ROWS)
    assert [name for name in LISTED.split() if name not in commands] == []


@pytest.mark.every(6, "full")
@pytest.mark.parametrize("command", [command for _, command in ROWS], ids=[name for name, _ in ROWS])
def test_a_real_class_passes(
    command: str, run_command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = shlex.split(command)[1]
    library = target.partition(":")[0].partition(".")[0]
    if library in LIBRARIES and find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install -c constraints.txt '.[findings]'")
    if library == "timm" and find_spec("torchvision") is None:
        command = command.replace(target, "tests/corpus/real/timm_layers.py:Attention")
    monkeypatch.chdir(ROOT)
    report = tmp_path / "report.json"
    done = run_command(*shlex.split(command), "--json", report)
    assert done.code == 0, done.out + done.err
    assert json.loads(report.read_text(encoding="utf-8"))["verdict"] == "passed"
