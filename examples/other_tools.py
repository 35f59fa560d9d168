"""Pass weights to BertViz, CircuitsVis and pandas, and make a map of q and k that another tool recorded.

It needs pandas, but not the other tools.
"""

import torch
from transformers import GPT2Config, GPT2Model

import manyheads
from manyheads import bridges, lm

text = " the file you want to read is not the file you need to read"
model, tokenizer = lm.load()  # the small model of the package
encoding = tokenizer.encode(text)
ids = torch.tensor([encoding.ids])  # [b, t]
with manyheads.observe(model) as recording, torch.no_grad():
    model(ids)
recording.label(manyheads.TokenizedText.from_encoding(text, encoding))

dense = recording.to_bertviz()  # bertviz.head_view(**dense)
print("BertViz:", len(dense["attention"]), "layers of weights", list(dense["attention"][0].shape))
layer = recording[2].to_circuitsvis()  # circuitsvis.attention.attention_heads(**layer)
print("CircuitsVis:", ", ".join(layer))
print("pandas:")
print(recording.table(ids).to_pandas()[["layer", "head", "induction"]].head(3).to_string(index=False))

# TransformerLens, nnsight and plain hooks give q and k; a map of them computes any weight when it is read.
gpt2 = GPT2Model(GPT2Config(n_layer=1, attn_implementation="sdpa")).eval()  # random weights
projections = []
hook = gpt2.h[0].attn.c_attn.register_forward_hook(lambda module, args, out: projections.append(out))
with torch.no_grad(), manyheads.observe(gpt2) as observed:
    gpt2(ids)
hook.remove()
q, k, _ = (x.unflatten(-1, (12, 64)).transpose(1, 2) for x in projections[0].split(768, -1))  # [b, h, t, d]
amap = bridges.lazy_pattern(q, k)
torch.testing.assert_close(amap[0, 3], observed[0][0, 3])
print("A map of a hook's q and k has the observed weights.")
