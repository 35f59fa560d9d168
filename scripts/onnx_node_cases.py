"""Print the table of docs/reference/onnx.md: the standard's cases of Attention, by what they test."""

from __future__ import annotations

import warnings
from collections import defaultdict

from onnx.backend.test.case.node import collect_testcases


def main() -> None:
    """Print a row for each version of the operator and dtype, with the names of its cases."""
    with warnings.catch_warnings(action="ignore"):
        cases = collect_testcases("Attention")
    rows = defaultdict(list)
    for case in cases:
        if [node.op_type for node in case.model.graph.node] != ["Attention"]:
            continue
        [opset] = [entry.version for entry in case.model.opset_import if not entry.domain]
        kind = case.model.graph.input[0].type.tensor_type.elem_type
        dtype = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}[kind]
        rows[opset, dtype].append(f"`{case.name.removeprefix('test_attention_')}`")
    print("| version | dtype | cases | names |\n|---|---|---|---|")
    for (opset, dtype), names in sorted(rows.items()):
        print(f"| {opset} | {dtype} | {len(names)} | {', '.join(names)} |")


if __name__ == "__main__":
    main()
