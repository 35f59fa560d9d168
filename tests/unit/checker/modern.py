"""Layers in the styles of real models, which the checker must recognize by their values."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class LlamaLike(nn.Module):
    """Causal grouped attention with rotary positions."""

    def __init__(self, dim, n_heads, n_kv_heads, rope_theta=10000.0):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.theta = rope_theta

    def rope(self, x):
        t, d = x.shape[-2:]
        inv = self.theta ** (-torch.arange(0, d, 2).float() / d)
        ang = torch.outer(torch.arange(t).float(), inv)
        ang = torch.cat((ang, ang), -1)
        return x * ang.cos() + rotate_half(x) * ang.sin()

    def forward(self, x):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, -1).transpose(1, 2)
        k = self.wk(x).view(b, t, self.n_kv_heads, -1).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv_heads, -1).transpose(1, 2)
        q, k = self.rope(q), self.rope(k)
        r = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        s = q @ k.mT / math.sqrt(self.head_dim)
        s = s.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        return self.wo((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


class QKNormWindow(nn.Module):
    """Causal attention in a sliding window, with query and key norms."""

    def __init__(self, dim, num_heads, window=4):
        super().__init__()
        self.num_heads = num_heads
        self.window = window
        d = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.q_norm = RMSNorm(d)
        self.k_norm = RMSNorm(d)

    def forward(self, x):
        b, t, e = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        i = torch.arange(t)
        m = (i[:, None] >= i) & (i[:, None] - i < self.window)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=m)
        return self.proj(o.transpose(1, 2).reshape(b, t, e))


class T5Like(nn.Module):
    def __init__(self, d_model, num_heads, num_buckets=32, max_distance=128):
        super().__init__()
        self.h = num_heads
        self.nb = num_buckets
        self.md = max_distance
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def bucket(self, rel):
        n = self.nb // 2
        out = (rel > 0).long() * n
        rel = rel.abs()
        me = n // 2
        large = me + (torch.log(rel.float() / me) / math.log(self.md / me) * (n - me)).long()
        return out + torch.where(rel < me, rel, large.clamp(max=n - 1))

    def forward(self, x):
        b, t, e = x.shape
        q, k, v = (f(x).view(b, t, self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        i = torch.arange(t)
        s = q @ k.mT + self.relative_attention_bias(self.bucket(i[None] - i[:, None])).permute(2, 0, 1)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, e))


class PostNorm(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head = n_head
        self.w_qs = nn.Linear(d_model, d_model, bias=False)
        self.w_ks = nn.Linear(d_model, d_model, bias=False)
        self.w_vs = nn.Linear(d_model, d_model, bias=False)
        self.fc = nn.Linear(d_model, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)
        self.drop = nn.Dropout(0.1)

    def forward(self, q, k, v):
        b, t, e = q.shape
        r = q

        def f(l, x):
            return l(x).view(b, x.shape[1], self.n_head, -1).transpose(1, 2)

        q, k, v = f(self.w_qs, q), f(self.w_ks, k), f(self.w_vs, v)
        a = (q / (q.shape[-1] ** 0.5) @ k.mT).softmax(-1)
        o = self.drop(self.fc((a @ v).transpose(1, 2).reshape(b, t, e))) + r
        return self.layer_norm(o)


class Alibi(nn.Module):
    """Causal self-attention with ALiBi."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.register_buffer("slopes", torch.tensor([2 ** (-8 / heads * (i + 1)) for i in range(heads)]))

    def forward(self, x):
        b, t, e = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.to_qkv(x).chunk(3, -1))
        i = torch.arange(t)
        s = q @ k.mT * (e // self.heads) ** -0.5 + self.slopes[:, None, None] * (i[None] - i[:, None])
        s = s.masked_fill(i[None] > i[:, None], -math.inf)
        return self.to_out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, e))


class Gated(nn.Module):
    def __init__(self, embed_dim, num_heads, softcap=20.0):
        super().__init__()
        self.num_heads = num_heads
        self.softcap = softcap
        self.norm = nn.LayerNorm(embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.g_proj = nn.Linear(embed_dim, embed_dim)
        self.o_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        b, t, e = x.shape
        r = x
        x = self.norm(x)
        q, k, v = (
            f(x).view(b, t, self.num_heads, -1).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        s = q @ k.mT / math.sqrt(q.shape[-1])
        s = self.softcap * torch.tanh(s / self.softcap)
        o = (s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, e) * torch.sigmoid(self.g_proj(x))
        return r + self.o_proj(o)


class ComplexLlama(nn.Module):
    def __init__(self, dim, n_heads, max_seq_len=64):
        super().__init__()
        self.n_heads = n_heads
        d = dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        f = 1.0 / (500000.0 ** (torch.arange(0, d, 2).float() / d))
        self.register_buffer(
            "freqs_cis",
            torch.polar(torch.ones(max_seq_len, d // 2), torch.outer(torch.arange(max_seq_len).float(), f)),
        )

    def forward(self, x):
        b, t, e = x.shape
        q, k, v = (f(x).view(b, t, self.n_heads, -1) for f in (self.wq, self.wk, self.wv))

        def rot(y):
            c = torch.view_as_complex(y.float().reshape(b, t, self.n_heads, -1, 2)) * self.freqs_cis[:t].view(
                1, t, 1, -1
            )
            return torch.view_as_real(c).flatten(3).type_as(y)

        q, k = rot(q), rot(k)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.wo(o.transpose(1, 2).reshape(b, t, e))


class PartialNeoX(nn.Module):
    def __init__(self, hidden_size, num_heads, rotary_dim=4):
        super().__init__()
        self.num_heads = num_heads
        self.rotary_dim = rotary_dim
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, x):
        b, t, e = x.shape
        qkv = self.query_key_value(x).view(b, t, self.num_heads, 3, -1)
        q, k, v = (qkv[..., i, :].transpose(1, 2) for i in range(3))
        n = self.rotary_dim
        a = torch.outer(torch.arange(t).float(), 10000 ** (-torch.arange(0, n, 2) / n))
        a = torch.cat((a, a), -1)

        def rot(y):
            return torch.cat((y[..., :n] * a.cos() + rotate_half(y[..., :n]) * a.sin(), y[..., n:]), -1)

        q, k = rot(q), rot(k)
        s = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        s = s + torch.full((t, t), float("-inf")).triu(1)
        return self.dense((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, e))


class ModdedGPT(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.c_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (f(x).view(B, T, self.num_heads, -1) for f in (self.wq, self.wk, self.wv))
        d = q.shape[-1]
        a = torch.outer(torch.arange(T).float(), (1 / 10000) ** (torch.arange(0, d, 2) / d))[None, :, None]

        def rot(y):
            y1, y2 = y.chunk(2, -1)
            return torch.cat((y1 * a.cos() + y2 * a.sin(), -y1 * a.sin() + y2 * a.cos()), -1)

        q, k = F.rms_norm(q, (d,)), F.rms_norm(k, (d,))
        q, k = rot(q), rot(k)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class OlmoLike(nn.Module):
    """Causal."""

    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.num_heads = num_attention_heads
        for n in "qkvo":
            setattr(self, n + "_proj", nn.Linear(hidden_size, hidden_size, bias=False))
        self.q_norm = RMSNorm(hidden_size, 1e-5)
        self.k_norm = RMSNorm(hidden_size, 1e-5)

    def forward(self, hidden_states):
        x = hidden_states
        b, t, e = x.shape
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (y.view(b, t, self.num_heads, -1).transpose(1, 2) for y in (q, k, v))
        d = q.shape[-1]
        a = torch.outer(torch.arange(t).float(), 10000 ** (-torch.arange(0, d, 2) / d))
        a = torch.cat((a, a), -1)
        q, k = (y * a.cos() + rotate_half(y) * a.sin() for y in (q, k))
        return self.o_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, e)
        )


class GemmaLike(nn.Module):
    """Causal; soft-capped scores; a token attends to itself and the window - 1 tokens before it."""

    def __init__(
        self,
        hidden_size,
        num_heads,
        num_kv_heads,
        query_pre_attn_scalar=9,
        attn_logit_softcapping=30.0,
        sliding_window=4,
        rope_theta=10000.0,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        d = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, d * num_kv_heads, bias=False)
        self.v_proj = nn.Linear(hidden_size, d * num_kv_heads, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.scaling = query_pre_attn_scalar**-0.5
        self.softcap = attn_logit_softcapping
        self.window = sliding_window
        self.theta = rope_theta

    def forward(self, x):
        b, t, e = x.shape
        q = self.q_proj(x).view(b, t, self.num_heads, -1).transpose(1, 2)
        k, v = (f(x).view(b, t, self.num_kv_heads, -1).transpose(1, 2) for f in (self.k_proj, self.v_proj))
        d = q.shape[-1]
        a = torch.outer(torch.arange(t).float(), self.theta ** (-torch.arange(0, d, 2) / d))
        a = torch.cat((a, a), -1)
        q, k = (y * a.cos() + rotate_half(y) * a.sin() for y in (q, k))
        r = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        s = q @ k.mT * self.scaling
        s = torch.tanh(s / self.softcap) * self.softcap
        i = torch.arange(t)
        m = (i[None] <= i[:, None]) & (i[None] > i[:, None] - self.window)
        s = s.masked_fill(~m, torch.finfo(s.dtype).min)
        return self.o_proj((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, e))


class SwinV2Like(nn.Module):
    """Cosine attention with a learned scale."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(num_heads, 1, 1)))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.logit_scale.exp()
        return self.proj((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class LucidRMS(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = dim**0.5
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * self.gamma


class LucidCross(nn.Module):
    def __init__(self, dim, context_dim, heads=4, dim_head=8):
        super().__init__()
        self.heads = heads
        inner = heads * dim_head
        self.scale = dim_head**-0.5
        self.norm = LucidRMS(dim)
        self.context_norm = LucidRMS(context_dim)
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(context_dim, inner * 2, bias=False)
        self.to_out = nn.Linear(inner, dim, bias=False)

    def forward(self, x, context):
        h = self.heads
        x = self.norm(x)
        context = self.context_norm(context)
        q = self.to_q(x)
        k, v = self.to_kv(context).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (h, -1)).transpose(1, 2) for y in (q, k, v))
        a = (q * self.scale @ k.mT).softmax(-1)
        return self.to_out((a @ v).transpose(1, 2).flatten(2))


class LayerScaled(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.gamma = nn.Parameter(1e-4 * torch.ones(dim))

    def forward(self, x):
        b, n, c = x.shape
        y = self.norm(x)
        q, k, v = self.qkv(y).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return x + self.gamma * self.proj(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)
        )


class HeadGate(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.head_gate = nn.Linear(dim, num_heads)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v) * self.head_gate(x).sigmoid().mT[..., None]
        return self.out(o.transpose(1, 2).reshape(b, n, c))


class Chunked(nn.Module):
    """Causal attention in chunks."""

    def __init__(self, dim, num_heads, chunk_size=4):
        super().__init__()
        self.num_heads = num_heads
        self.chunk_size = chunk_size
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        i = torch.arange(n)
        m = (i[:, None] >= i) & (i[:, None] // self.chunk_size == i // self.chunk_size)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=m).transpose(1, 2).reshape(b, n, c))


class RelBias(nn.Module):
    def __init__(self, dim, num_heads, max_len=64):
        super().__init__()
        self.num_heads = num_heads
        self.max_len = max_len
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.table = nn.Parameter(torch.zeros(2 * max_len - 1, num_heads))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        i = torch.arange(n)
        bias = self.table[i[:, None] - i + self.max_len - 1].permute(2, 0, 1)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(b, n, c)
        )


class Sinks(nn.Module):
    """Causal attention with sinks in a sliding window, with rotary positions."""

    def __init__(self, dim, num_heads, sliding_window=4):
        super().__init__()
        self.num_heads = num_heads
        self.w = sliding_window
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.sinks = nn.Parameter(torch.zeros(num_heads))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        d = q.shape[-1]
        a = torch.outer(torch.arange(n).float(), 10000 ** (-torch.arange(0, d, 2) / d))
        a = torch.cat((a, a), -1)
        q, k = (y * a.cos() + rotate_half(y) * a.sin() for y in (q, k))
        i = torch.arange(n)
        m = (i[:, None] >= i) & (i[:, None] - i < self.w)
        s = (q @ k.mT / d**0.5).masked_fill(~m, float("-inf"))
        s = torch.cat((s, self.sinks[:, None, None].expand(b, -1, n, 1)), -1).softmax(-1)[..., :-1]
        return self.out((s @ v).transpose(1, 2).reshape(b, n, c))


class BiWindow(nn.Module):
    def __init__(self, dim, num_heads, window=2):
        super().__init__()
        self.num_heads = num_heads
        self.window = window
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        i = torch.arange(n)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=(i[:, None] - i).abs() <= self.window)
            .transpose(1, 2)
            .reshape(b, n, c)
        )


class Conv(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x):
        b, n, c = x.shape
        x = x + self.conv(x.mT).mT
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class Talking(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.talk = nn.Linear(num_heads, num_heads, bias=False)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        s = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        s = self.talk(s.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out((s @ v).transpose(1, 2).reshape(b, n, c))


class AlibiBi(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        h = self.num_heads
        q, k, v = self.qkv(x).reshape(b, n, 3, h, -1).permute(2, 0, 3, 1, 4)
        i = torch.arange(n)
        m = 2.0 ** (-8 / h * torch.arange(1, h + 1))
        return self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=-m[:, None, None] * (i[:, None] - i).abs())
            .transpose(1, 2)
            .reshape(b, n, c)
        )


class Streaming(nn.Module):
    """Causal attention with rotary positions; the window shows its own, the last and the first tokens."""

    def __init__(self, dim, n_heads, window=4, first_tokens=1):
        super().__init__()
        self.n_heads, self.window, self.first = n_heads, window, first_tokens
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))

    def rope(self, x, start):
        t, d = x.shape[-2:]
        angles = torch.outer(start + torch.arange(t).float(), 10000.0 ** (-torch.arange(0, d, 2) / d))
        angles = torch.cat((angles, angles), -1)
        return x * angles.cos() + rotate_half(x) * angles.sin()

    def forward(self, x, padding_mask=None, cache=None):
        """padding_mask [b, s]: True for tokens, False for padding."""
        q, k, v = (
            f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.wq, self.wk, self.wv)
        )
        past = 0 if cache is None else cache[0].shape[2]
        start = past
        q, k = self.rope(q, start), self.rope(k, start)
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        i, j = torch.arange(past, k.shape[2])[:, None], torch.arange(k.shape[2])
        visible = (j <= i) & ((i - j < self.window) | (j < self.first))
        if padding_mask is not None:
            visible = visible & padding_mask[:, None, None]
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
        return self.wo((weights @ v).transpose(1, 2).flatten(2)), (k, v)


class SinkNTK(nn.Module):
    """Causal attention with sinks, a window, and rotary positions whose base is scaled (NTK)."""

    def __init__(self, dim, n_heads, window=3, rope_theta=10000.0, ntk_alpha=4.0):
        super().__init__()
        self.n_heads, self.window = n_heads, window
        d = dim // n_heads
        self.base = rope_theta * ntk_alpha ** (d / (d - 2))
        self.sinks = nn.Parameter(torch.zeros(n_heads))
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))

    def rope(self, x):
        t, d = x.shape[-2:]
        angles = torch.outer(torch.arange(t).float(), self.base ** (-torch.arange(0, d, 2) / d))
        angles = torch.cat((angles, angles), -1)
        return x * angles.cos() + rotate_half(x) * angles.sin()

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (
            f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.wq, self.wk, self.wv)
        )
        scores = self.rope(q) @ self.rope(k).mT / q.shape[-1] ** 0.5
        i = torch.arange(t)
        visible = (i <= i[:, None]) & (i[:, None] - i < self.window)
        scores = scores.masked_fill(~visible, float("-inf"))
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return self.wo((weights @ v).transpose(1, 2).flatten(2))


class Cosine(nn.Module):
    """Causal attention whose scores are cosines, times a learned factor of each head."""

    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))
        self.log_factor = nn.Parameter(torch.full((n_heads, 1, 1), 2.0))

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.wq, self.wk, self.wv)
        )
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scores = q @ k.mT * self.log_factor.exp()
        t = x.shape[1]
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class CachedLlama(nn.Module):
    """Causal self-attention with grouped key heads and rotary positions of base `rope_theta`.

    forward(hidden_states [b, t, hidden], past_key_value=None or (k, v)) -> (out, (k, v))
    """

    def __init__(self, hidden_size=64, num_heads=4, num_key_value_heads=2, rope_theta=10000.0):
        super().__init__()
        self.num_heads, self.num_kv = num_heads, num_key_value_heads
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.num_kv * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.num_kv * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)
        inv_freq = 1.0 / (rope_theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def table(self, start, length):
        freqs = torch.arange(start, start + length).float()[:, None] * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()

    def rotate_half(self, x):
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((-x2, x1), dim=-1)

    def rope(self, x, cos, sin):
        return x * cos + self.rotate_half(x) * sin

    def repeat_kv(self, x):
        return x.repeat_interleave(self.num_heads // self.num_kv, dim=1)

    def forward(self, hidden_states, past_key_value=None):
        b, t, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(b, t, self.num_kv, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, t, self.num_kv, self.head_dim).transpose(1, 2)
        past = 0 if past_key_value is None else past_key_value[0].shape[2]
        cos, sin = self.table(past, t)
        q, k = self.rope(q, cos, sin), self.rope(k, cos, sin)
        if past_key_value is not None:
            k = torch.cat((past_key_value[0], k), dim=2)
            v = torch.cat((past_key_value[1], v), dim=2)
        present = (k, v)
        k, v = self.repeat_kv(k), self.repeat_kv(v)
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)
        mask = torch.ones(t, past + t, dtype=torch.bool).tril(past)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = F.softmax(scores, dim=-1)
        out = weights @ v
        out = out.transpose(1, 2).reshape(b, t, -1)
        return self.o_proj(out), present


class CachedQwen(nn.Module):
    """Causal attention, query/key norms before rotary positions, sliding window, soft cap of the scores.

    x [b, t, dim]; start_pos: how many tokens are in the cache of earlier calls; reset() empties it.
    Token i attends to itself and the `sliding_window - 1` tokens before it.
    """

    def __init__(self, dim=64, n_heads=4, n_kv_heads=2, sliding_window=5, logit_softcap=20.0, theta=10000.0):
        super().__init__()
        self.h, self.g, self.d = n_heads, n_kv_heads, dim // n_heads
        self.window, self.cap, self.theta = sliding_window, logit_softcap, theta
        self.wq = nn.Linear(dim, self.h * self.d, bias=False)
        self.wk = nn.Linear(dim, self.g * self.d, bias=False)
        self.wv = nn.Linear(dim, self.g * self.d, bias=False)
        self.wo = nn.Linear(self.h * self.d, dim, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.d), RMSNorm(self.d)
        self.reset()

    def reset(self):
        self.k_cache = self.v_cache = None

    def rotate(self, x, positions):
        freqs = self.theta ** (-torch.arange(0, self.d, 2, device=x.device) / self.d)
        angles = positions[:, None] * freqs
        a, b = x[..., ::2], x[..., 1::2]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).type_as(x)

    def forward(self, x, start_pos=0):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.h, self.d)
        k = self.wk(x).view(b, t, self.g, self.d)
        v = self.wv(x).view(b, t, self.g, self.d)
        q, k = self.q_norm(q), self.k_norm(k)
        positions = torch.arange(start_pos, start_pos + t)
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        if start_pos > 0:
            k = torch.cat((self.k_cache, k), 1)
            v = torch.cat((self.v_cache, v), 1)
        self.k_cache, self.v_cache = k, v
        keys = k.repeat_interleave(self.h // self.g, 2)
        values = v.repeat_interleave(self.h // self.g, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * self.d**-0.5
        scores = self.cap * torch.tanh(scores / self.cap)
        i, j = positions[:, None], torch.arange(start_pos + t)[None]
        scores = scores.masked_fill((j > i) | (i - j >= self.window), float("-inf"))
        weights = torch.softmax(scores.float(), -1).type_as(x)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
        return self.wo(out.flatten(2))


class CachedT5(nn.Module):
    """Causal decoder self-attention of T5: relative bias by buckets, no scale.

    forward(hidden_states [b, t, d], past_key_value=None) -> (out, (k, v))
    """

    def __init__(
        self, d_model=64, n_heads=4, relative_attention_num_buckets=32, relative_attention_max_distance=128
    ):
        super().__init__()
        self.n, self.d = n_heads, d_model // n_heads
        self.buckets, self.max_distance = relative_attention_num_buckets, relative_attention_max_distance
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(self.buckets, n_heads)

    def bucket(self, relative):
        n = -torch.min(relative, torch.zeros_like(relative))
        exact = self.buckets // 2
        ratio = torch.log(n.float().clamp(min=1) / exact) / math.log(self.max_distance / exact)
        large = exact + (ratio * (self.buckets - exact)).long()
        return torch.where(n < exact, n, large.clamp(max=self.buckets - 1))

    def forward(self, hidden_states, past_key_value=None):
        b, t, _ = hidden_states.shape
        heads = (f(hidden_states).view(b, t, self.n, self.d) for f in (self.q, self.k, self.v))
        q, k, v = (x.transpose(1, 2) for x in heads)
        if past_key_value is not None:
            k, v = torch.cat((past_key_value[0], k), 2), torch.cat((past_key_value[1], v), 2)
        s = k.shape[2]
        i, j = torch.arange(s - t, s)[:, None], torch.arange(s)[None]
        scores = q @ k.mT
        scores = scores + self.relative_attention_bias(self.bucket(j - i)).permute(2, 0, 1)
        scores = scores.masked_fill(j > i, torch.finfo(scores.dtype).min)
        out = scores.softmax(-1) @ v
        return self.o(out.transpose(1, 2).reshape(b, t, -1)), (k, v)


class CachedBloom(nn.Module):
    """Causal attention with ALiBi and a learned sink for each head.

    hidden_states [b, t, d]; layer_past=None or (k, v); returns (out, (k, v)).
    """

    def __init__(self, hidden_size=64, n_head=4):
        super().__init__()
        self.n, self.d = n_head, hidden_size // n_head
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.sinks = nn.Parameter(torch.randn(n_head))

    def forward(self, hidden_states, layer_past=None):
        b, t, _ = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(b, t, self.n, 3, self.d)
        q, k, v = (fused[..., n, :].transpose(1, 2) for n in range(3))
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), 2), torch.cat((layer_past[1], v), 2)
        s = k.shape[2]
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.n + 1) / self.n)
        i, j = torch.arange(s - t, s)[:, None], torch.arange(s)[None]
        scores = q @ k.mT * self.d**-0.5
        scores = scores + slopes[:, None, None] * (j - i)
        scores = scores.masked_fill(j > i, float("-inf"))
        sink = self.sinks[None, :, None, None].expand(b, -1, t, 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)
        weights = weights[..., :-1]
        return self.dense((weights @ v).transpose(1, 2).reshape(b, t, -1)), (k, v)
