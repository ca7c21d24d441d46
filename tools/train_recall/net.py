"""The two recall models for training: the same arithmetic and parameter names as transformers' classes.

Only the form differs, so that a small model trains at millions of tokens a minute: a batch is a flat row of
N = B x T tokens, all experts are computed and weighted (their total width is that of a small dense layer), and
the delta rule runs in chunks whose states are joined by a scan of logarithmic depth.

Letters: N tokens of a batch, B documents of T tokens, H width, C chunks of 64, Hv heads, K, V head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 1152,
    "hidden_size": 192,
    "num_hidden_layers": 8,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "full_attention_interval": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attn_output_gate": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
    },
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "mamba_ssm_dtype": "float32",
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 128,
    "router_aux_loss_coef": 0.001,
    "mlp_only_layers": [],
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "use_cache": True,
    "dtype": "bfloat16",
}
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1152,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "layer_types": ["full_attention"] * 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000_000},
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "use_cache": True,
    "use_sliding_window": False,
    "dtype": "bfloat16",
}
CONFIGS = {"hybrid": HYBRID, "dense": DENSE}


@dataclass(frozen=True)
class Batch:
    """Shape of a batch and what depends on positions only. cos, sin [N, R]; keep[i] [N, 1]: 1 where a token has
    i + 1 tokens before it."""

    B: int
    T: int
    cos: Tensor
    sin: Tensor
    keep: tuple[Tensor, Tensor, Tensor]


def make_batch(config: dict[str, Any], B: int, T: int, device: str) -> Batch:
    """Rotary tables and conv masks for B documents of T tokens."""
    rope = config["rope_parameters"]
    dim = int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    inv = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, device=device).float() / dim))
    angles = torch.arange(T, device=device).float()[:, None] * inv
    angles = torch.cat((angles, angles), -1).repeat(B, 1)
    places = torch.arange(T, device=device).repeat(B)[:, None]
    keep = tuple((places >= i).float() for i in (1, 2, 3))
    return Batch(B, T, angles.cos(), angles.sin(), keep)  # type: ignore[arg-type]


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension in fp32; weight is the whole factor."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, heads, D] over the first R dims; cos, sin [N, R]."""
    R = cos.shape[-1]
    head, rest = x[..., :R], x[..., R:]
    half = torch.cat((-head[..., R // 2 :], head[..., : R // 2]), -1)
    return torch.cat((head * cos[:, None] + half * sin[:, None], rest), -1)


def invert(A: Tensor) -> Tensor:
    """(I + A)^-1 of strictly lower triangular A [*, L, L], L a power of 2, from the inverses of its two halves."""
    L = A.shape[-1]
    if L == 16:
        # Inverses of blocks of 1, 2, 4, 8 on the diagonal, all at once.
        at = torch.arange(L, device=A.device)
        inverse = torch.eye(L, device=A.device).expand_as(A)
        for size in (1, 2, 4, 8):
            same = at[:, None] // (2 * size) == at[None] // (2 * size)
            below = (at[:, None] // size % 2 == 1) & (at[None] // size % 2 == 0)
            part = A * (same & below)
            inverse = inverse - (part if size == 1 else inverse @ part @ inverse)
        return inverse
    h = L // 2
    upper, lower = invert(torch.stack((A[..., :h, :h], A[..., h:, h:]))).unbind()
    left = -lower @ A[..., h:, :h] @ upper
    return torch.cat((F.pad(upper, (0, h)), torch.cat((left, lower), -1)), -2)


class UnitLowerInverse(torch.autograd.Function):
    """`invert` with its gradient; in full fp32, since errors of early rows spread to all later ones."""

    @staticmethod
    def forward(ctx: Any, A: Tensor) -> Tensor:
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        inverse = invert(A)
        torch.backends.cuda.matmul.allow_tf32 = allowed
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ grad @ turned).tril(-1)


def scan_states(A: Tensor, B: Tensor) -> Tensor:
    """States before each chunk of S <- A S + B from zero: A [B, C, Hv, K, K], B [B, C, Hv, K, V]."""
    if A.shape[1] == 1:
        return torch.zeros_like(B)
    if A.shape[1] % 2:
        # One more chunk, of which nobody reads the outcome.
        return scan_states(F.pad(A, (0, 0, 0, 0, 0, 0, 0, 1)), F.pad(B, (0, 0, 0, 0, 0, 0, 0, 1)))[:, :-1]
    A0, A1 = A[:, 0::2].contiguous(), A[:, 1::2].contiguous()
    B0, B1 = B[:, 0::2].contiguous(), B[:, 1::2].contiguous()
    if A.shape[1] == 2:
        return torch.stack((torch.zeros_like(B0), B0), 2).flatten(1, 2)
    even = scan_states(A1 @ A0, A1 @ B0 + B1)
    return torch.stack((even, A0 @ even + B0), 2).flatten(1, 2)


def delta_inputs(
    qkv: Tensor, a: Tensor, b: Tensor, conv: Tensor, A_log: Tensor, dt_bias: Tensor,
    k1: Tensor, k2: Tensor, k3: Tensor, heads: tuple[int, int, int, int],
) -> tuple[Tensor, ...]:  # fmt: skip
    """From projections [N, *] to chunked q, k [C, Hv, 64, K], v, beta, decay sums and the system to invert."""
    kh, vh, K, V = heads
    w = conv[:, 0, :].float()
    x = qkv.float()
    x1, x2, x3 = (F.pad(x, (0, 0, i, 0))[: x.shape[0]] for i in (1, 2, 3))
    x = F.silu(x * w[:, 3] + x1 * k1 * w[:, 2] + x2 * k2 * w[:, 1] + x3 * k3 * w[:, 0])
    q, k, v = x.split((kh * K, kh * K, vh * V), -1)
    chunks = x.shape[0] // CHUNK

    def chunked(y: Tensor, heads: int) -> Tensor:
        y = y.reshape(chunks, CHUNK, heads, -1).transpose(1, 2)
        return y.repeat_interleave(vh // heads, 1) if heads != vh else y

    q, k, v = chunked(q, kh), chunked(k, kh), chunked(v, vh)
    q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * K**-0.5
    k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    beta = chunked(b.float().sigmoid(), vh)
    total = chunked(g, vh)[..., 0].cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    system = ((k * beta) @ k.transpose(-1, -2) * decay).tril(-1)
    inner = q @ k.transpose(-1, -2) * decay
    return q.contiguous(), k.contiguous(), v.contiguous(), beta, total, system, inner


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, total: Tensor, inverse: Tensor, inner: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What each chunk does: read [C, Hv, 64, K] of the state, its own output, and S <- A S + B."""
    seen = total.exp()[..., None]
    U = inverse @ (v * beta)
    W = inverse @ (k * (beta * seen))
    read = q * seen - inner @ W
    left = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    eye = torch.eye(q.shape[-1], device=q.device)
    return read, inner @ U, eye * seen[..., -1:, :] - left @ W, left @ U


def delta_output(read: Tensor, own: Tensor, states: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """Chunk outputs [C, Hv, 64, V] joined, normed and gated: [N, Hv V]."""
    out = (own + read @ states).transpose(1, 2)
    out = out.reshape(z.shape[0], out.shape[2], -1)
    out = norm(out, weight) * F.silu(z.float().reshape(out.shape))
    return out.flatten(1)


class Linear(nn.Linear):
    """A product without bias in the type of its input; weights stay fp32."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class DeltaNet(nn.Module):
    """Gated delta net layer."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        H, K, V = c["hidden_size"], c["linear_key_head_dim"], c["linear_value_head_dim"]
        kh, vh = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.heads = (kh, vh, K, V)
        width = 2 * kh * K + vh * V
        self.in_proj_qkv = Linear(H, width)
        self.in_proj_z = Linear(H, vh * V)
        self.in_proj_b = Linear(H, vh)
        self.in_proj_a = Linear(H, vh)
        self.conv1d = nn.Conv1d(width, width, 4, groups=width, bias=False)
        self.A_log = nn.Parameter(torch.linspace(0.02, 4.0, vh).log())
        # softplus(dt_bias) from 0.01 to 0.3: memories from a few to thousands of tokens.
        self.dt_bias = nn.Parameter(torch.linspace(0.01, 0.3, vh).expm1().log())
        self.norm = Weight(V, 1.0)
        self.out_proj = Linear(vh * V, H)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        inputs = OPS["delta_inputs"](
            self.in_proj_qkv(x), self.in_proj_a(x), self.in_proj_b(x), self.conv1d.weight, self.A_log,
            self.dt_bias, *batch.keep, self.heads,
        )  # fmt: skip
        *parts, system, inner = inputs
        inverse = UnitLowerInverse.apply(system)
        read, own, A, B = OPS["delta_chunks"](*parts, inverse, inner)
        states = scan_states(A.unflatten(0, (batch.B, -1)), B.unflatten(0, (batch.B, -1)))
        out = OPS["delta_output"](read, own, states.flatten(0, 1), self.in_proj_z(x), self.norm.weight)
        return self.out_proj(out.to(x.dtype))


class Weight(nn.Module):
    """A norm's weight under its checkpoint name."""

    def __init__(self, size: int, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), value))


def attention_inputs(
    qg: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, D: int, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed and rotated q and k [N, heads, D], and the gate [N, heads D]."""
    N = k.shape[0]
    qg = qg.view(N, -1, 2 * D if gated else D)
    gate = qg[..., D:].sigmoid().reshape(N, -1) if gated else qg[..., :0]
    q = rotate(norm(qg[..., :D], q_weight), cos, sin)
    k = rotate(norm(k.view(N, -1, D), k_weight), cos, sin)
    return q.to(qg.dtype), k.to(qg.dtype), gate


class Attention(nn.Module):
    """Full attention with normed q and k; gated and partly rotated in the hybrid."""

    def __init__(self, c: dict[str, Any], gated: bool) -> None:
        super().__init__()
        H, D = c["hidden_size"], c["head_dim"]
        self.D, self.gated, self.one = D, gated, 1.0 if gated else 0.0
        q, kv = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
        self.q_proj = Linear(H, 2 * q if gated else q)
        self.k_proj = Linear(H, kv)
        self.v_proj = Linear(H, kv)
        self.o_proj = Linear(q, H)
        # Sharp from the start: one right token must outweigh a hundred thousand others.
        self.q_norm = Weight(D, 1.5 - self.one)
        self.k_norm = Weight(D, 1.5 - self.one)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        v = self.v_proj(x)
        q, k, gate = OPS["attention_inputs"](
            self.q_proj(x), self.k_proj(x), self.q_norm.weight + self.one, self.k_norm.weight + self.one,
            batch.cos, batch.sin, self.D, self.gated,
        )  # fmt: skip
        q, k, v = (y.view(batch.B, batch.T, -1, self.D).transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = out.transpose(1, 2).reshape(x.shape[0], -1)
        return self.o_proj(out * gate if self.gated else out)


def experts(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared: tuple[Tensor, Tensor, Tensor, Tensor],
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """Output [N, H] of routed and shared experts, and the balance of the load (1 is even)."""
    E, twice, H = gate_up.shape
    I = twice // 2
    scores = F.linear(x.float(), router.float()).softmax(-1)
    top, chosen = scores.topk(top_k, -1)
    top = top / top.sum(-1, keepdim=True)
    weights = torch.zeros_like(scores).scatter(-1, chosen, top)
    balance = E * ((weights > 0).float().mean(0) / top_k * scores.mean(0)).sum()
    h = F.linear(x, gate_up.reshape(-1, H).to(x.dtype)).view(-1, E, twice)
    h = F.silu(h[..., :I]) * h[..., I:] * weights[..., None].to(x.dtype)
    out = h.reshape(-1, E * I) @ down.transpose(1, 2).reshape(E * I, H).to(x.dtype)
    gate_w, up_w, down_w, open_w = (w.to(x.dtype) for w in shared)
    s = F.linear(F.silu(F.linear(x, gate_w)) * F.linear(x, up_w), down_w)
    return out + s * F.linear(x, open_w).sigmoid(), balance


class Experts(nn.Module):
    """Parameters of the routed experts under their checkpoint names."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        E, I, H = c["num_experts"], c["moe_intermediate_size"], c["hidden_size"]
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, H))
        self.down_proj = nn.Parameter(torch.empty(E, H, I))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, H: int, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(H, width)
        self.up_proj = Linear(H, width)
        self.down_proj = Linear(width, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    """Routed experts with a shared one."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        H = c["hidden_size"]
        self.top_k = c["num_experts_per_tok"]
        self.gate = Linear(H, c["num_experts"])
        self.experts = Experts(c)
        self.shared_expert = Mlp(H, c["shared_expert_intermediate_size"])
        self.shared_expert_gate = Linear(H, 1)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        s = self.shared_expert
        shared = (s.gate_proj.weight, s.up_proj.weight, s.down_proj.weight, self.shared_expert_gate.weight)
        out, self.balance = OPS["experts"](
            x, self.gate.weight, self.experts.gate_up_proj, self.experts.down_proj, shared, self.top_k
        )
        return out


class Layer(nn.Module):
    """Mixer and feed-forward part with their norms."""

    def __init__(self, c: dict[str, Any], index: int) -> None:
        super().__init__()
        self.hybrid = "linear_key_head_dim" in c
        H = c["hidden_size"]
        if c["layer_types"][index] == "linear_attention":
            self.linear_attn = DeltaNet(c)
        else:
            self.self_attn = Attention(c, gated=self.hybrid)
        self.mlp = Moe(c) if self.hybrid else Mlp(H, c["intermediate_size"])
        self.one = 1.0 if self.hybrid else 0.0
        self.input_layernorm = Weight(H, 1.0 - self.one)
        self.post_attention_layernorm = Weight(H, 1.0 - self.one)

    def forward(self, x: Tensor, batch: Batch, dtype: torch.dtype) -> Tensor:
        mixer = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        x = x + mixer(OPS["norm"](x, self.input_layernorm.weight + self.one).to(dtype), batch)
        return x + self.mlp(OPS["norm"](x, self.post_attention_layernorm.weight + self.one).to(dtype))


class Body(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c["num_hidden_layers"]))
        self.norm = Weight(c["hidden_size"], 0.0 if "linear_key_head_dim" in c else 1.0)


class RecallNet(nn.Module):
    """A recall model; `state_dict` has transformers' names."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        super().__init__()
        self.config = CONFIGS[kind]
        self.one = 1.0 if kind == "hybrid" else 0.0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = Body(self.config)
            self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        """Products 0.7 / sqrt(fan-in), those that write to the residual a quarter of it, embedding 0.5 / sqrt(H)."""
        for name, p in self.named_parameters():
            if "embed_tokens" in name:
                p.normal_(0, 0.5 / p.shape[1] ** 0.5)
            elif "conv1d" in name:
                p.normal_(0, 0.2)
                p[:, :, 3] += 0.7
            elif p.ndim >= 2:
                small = 0.25 if any(n in name for n in ("o_proj", "out_proj", "down_proj")) else 1.0
                p.normal_(0, 0.7 * small / p.shape[-1] ** 0.5)

    def forward(
        self, ids: Tensor, batch: Batch, rows: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Logits [R, vocabulary] of the flat batch ids [N] at `rows`, or at all. dtype: of the large products."""
        weight = self.model.embed_tokens.weight
        x = F.embedding(ids, weight).float()
        for layer in self.model.layers:
            x = layer(x, batch, dtype)
        if rows is not None:
            x = x[rows]
        x = norm(x, self.model.norm.weight + self.one)
        return F.linear(x.to(dtype), weight.to(dtype)).float()

    def balance(self) -> Tensor:
        """Mean load balance of the expert layers; 1 is even."""
        parts = [layer.mlp.balance for layer in self.model.layers if isinstance(layer.mlp, Moe)]
        return torch.stack(parts).mean() if parts else torch.ones((), device=self.model.norm.weight.device)


PLAIN: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (norm, delta_inputs, delta_chunks, delta_output, attention_inputs, experts)
}
"""The parts between large products."""
OPS = dict(PLAIN)


def compile_ops() -> None:
    """Compile the parts: they are many small operations. A part that does not compile stays as it is."""
    import torch._dynamo

    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.cache_size_limit = 64
    for name, op in PLAIN.items():
        OPS[name] = torch.compile(op, dynamic=False)


@contextmanager
def plain_ops() -> Iterator[None]:
    """Uncompiled parts for a while: for shapes that come once."""
    kept = dict(OPS)
    OPS.update(PLAIN)
    yield
    OPS.update(kept)
