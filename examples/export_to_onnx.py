"""Export the small language model to ONNX, run it in onnxruntime, and read the weights of a node."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.export import Dim

import manyheads
from manyheads import lm

model, tokenizer = lm.load()
text = "the file you want to read is not the file you need to read"
ids = torch.tensor([tokenizer.encode(text).ids])  # [1, t]
lengths = ({1: Dim("t", min=1, max=model.context)},)

with TemporaryDirectory() as folder:
    path = Path(folder) / "model.onnx"
    report = manyheads.onnx.export(model.eval(), (ids,), path, dynamic_shapes=lengths)
    print(report)

    # onnxruntime predicts the same token, for a text of another length.
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    [name] = [given.name for given in session.get_inputs()]
    [logits] = session.run(None, {name: ids[:, :7].numpy()})
    assert logits[0, -1].argmax() == model(ids[:, :7])[0, -1].argmax()

# A node of the file, as a call of attention.
node = next(node for node in report.program.model_proto.graph.node if node.op_type == "Attention")
attend = manyheads.from_onnx_attention(node)
q, k, v = torch.randn(3, 1, 6, 12, 32)  # each [b, h, t, d]
_, amap = manyheads.attention_with_map(**attend.arguments(q, k, v))
print("weights of the first node:", tuple(amap.shape), "causal:", bool((amap[0, 0].triu(1) == 0).all()))
