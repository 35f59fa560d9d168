"""ONNX: export models that use this library's attention, and compute the standard's `Attention` nodes.

report = manyheads.onnx.export(model, (x,), "model.onnx")
print(report)  # which calls became the Attention operator, and why others didn't

attend = manyheads.from_onnx_attention(node)  # a node of any ONNX model
out = attend(q, k, v).Y
"""

from manyheads.onnx.exporter import Report, export
from manyheads.onnx.nodes import AttentionNode, Outputs, from_onnx_attention

__all__ = ["AttentionNode", "Outputs", "Report", "export", "from_onnx_attention"]
