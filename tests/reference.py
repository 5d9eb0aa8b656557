"""Independent references, written from the formulas, slow and plain: no caches, no batching, explicit softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from adaflash.drafter_config import DrafterConfig


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def frequencies(c: DrafterConfig) -> tuple[list[float], float]:
    """Inverse frequencies and the factor on cos and sin, from the papers of the scaled variants."""
    d, scaling = c.rotary_dim, c.rope_scaling or {}
    plain = [c.rope_theta ** (-2 * i / d) for i in range(d // 2)]
    kind, factor = scaling.get("rope_type", "default"), scaling.get("factor", 1.0)
    old = scaling.get("original_max_position_embeddings", c.max_position_embeddings)
    if kind == "linear":
        return [f / factor for f in plain], 1.0
    if kind == "llama3":
        out = []
        for f in plain:
            turns = old * f / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept = min(1.0, max(0.0, (turns - low) / (high - low)))
            out.append(kept * f + (1 - kept) * f / factor)
        return out, 1.0
    if kind == "yarn":

        def dimension(turns: float) -> float:
            return d * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(c.rope_theta))

        low = max(math.floor(dimension(scaling.get("beta_fast", 32))), 0)
        high = min(math.ceil(dimension(scaling.get("beta_slow", 1))), d - 1)
        out = []
        for i, f in enumerate(plain):
            ramp = min(1.0, max(0.0, (i - low) / max(high - low, 0.001)))
            out.append((1 - ramp) * f + ramp * f / factor)
        return out, 0.1 * math.log(factor) + 1.0
    return plain, 1.0


def rope(x: Tensor, position: int, c: DrafterConfig) -> Tensor:
    """x [heads, d]; half-split rotation of the leading dimensions, written with complex numbers."""
    inverse, scale = frequencies(c)
    half = len(inverse)
    angle = torch.tensor([position * f for f in inverse], dtype=torch.float64)
    z = torch.complex(x[:, :half].double(), x[:, half : 2 * half].double()) * torch.polar(
        torch.full_like(angle, scale), angle
    )
    return torch.cat([z.real, z.imag, x[:, 2 * half :].double()], -1).to(x.dtype)


def draft_hidden(c: DrafterConfig, w: dict[str, Tensor], context: Tensor, block: Tensor) -> Tensor:
    """context [n, K * hidden] at positions 0..n-1, block [B, hidden] at n..n+B-1 -> final-normed [B, hidden]."""
    n, width = len(context), len(block)
    ctx = rms(context @ w["fc.weight"].T, w["hidden_norm.weight"], c.rms_norm_eps)
    x = block
    group = c.num_attention_heads // c.num_key_value_heads
    for i in range(c.num_hidden_layers):
        window = c.sliding_window if (c.layer_types or {i: ""})[i] == "sliding_attention" else None
        p = {k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        h = rms(x, p["input_layernorm.weight"], c.rms_norm_eps)
        source = torch.cat([ctx, h])
        keys, values, queries = [], [], []
        for position, row in enumerate(source):
            k = (p["self_attn.k_proj.weight"] @ row).view(c.num_key_value_heads, c.head_dim)
            keys.append(rope(rms(k, p["self_attn.k_norm.weight"], c.rms_norm_eps), position, c))
            values.append((p["self_attn.v_proj.weight"] @ row).view(c.num_key_value_heads, c.head_dim))
        for slot in range(width):
            q = (p["self_attn.q_proj.weight"] @ h[slot]).view(c.num_attention_heads, c.head_dim)
            queries.append(rope(rms(q, p["self_attn.q_norm.weight"], c.rms_norm_eps), n + slot, c))
        k_all, v_all = torch.stack(keys), torch.stack(values)
        out = torch.empty(width, c.num_attention_heads, c.head_dim)
        for slot in range(width):
            for head in range(c.num_attention_heads):
                scores = k_all[:, head // group] @ queries[slot][head] / math.sqrt(c.head_dim)
                if window is not None:
                    # A sliding layer is causal and sees `window` tokens, itself included.
                    at = torch.arange(n + width)
                    scores = scores.masked_fill((at > n + slot) | (at <= n + slot - window), -math.inf)
                out[slot, head] = torch.softmax(scores, 0) @ v_all[:, head // group]
        x = x + out.reshape(width, -1) @ p["self_attn.o_proj.weight"].T
        h = rms(x, p["post_attention_layernorm.weight"], c.rms_norm_eps)
        gate = h @ p["mlp.gate_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"], c.rms_norm_eps)


def confidences(w: dict[str, Tensor], hidden: Tensor) -> list[float]:
    """The confidence head on the final-normed block [B, hidden]: sigma((p . h_j + b) / T_j) per drafted slot."""
    weight, bias, t = (w[f"confidence_head.{n}"] for n in ("proj.weight", "proj.bias", "temperature"))
    return [1 / (1 + math.exp(-float((weight[0] @ h + bias[0]) / t[j]))) for j, h in enumerate(hidden[1:])]


def length_rows(w: dict[str, Tensor], hidden: Tensor, rate: float) -> int:
    """AdaFlash's rule: the scalar head's ratio times block and rate, rounded, within 1..B."""

    def linear(name: str, x: Tensor) -> Tensor:
        return w[f"length_head.{name}.weight"] @ x + w[f"length_head.{name}.bias"]

    x = linear("down", torch.cat([hidden.mean(0), hidden[-1]]))
    x = x * torch.sigmoid(x)
    y = linear("res.0", x)
    ratio = torch.sigmoid(linear("out", x + y * torch.sigmoid(y)))
    return max(1, min(len(hidden), round(float(ratio) * len(hidden) * rate)))


def best_budget(survival: list[float], cost: Callable[[int], float], least_gain: float = 0.03) -> int:
    """Slots that one request should verify: argmax of tokens over seconds, all of them if that gains too little."""
    speeds = [(1 + sum(survival[:m])) / cost(m) for m in range(len(survival) + 1)]
    worth = sum(s >= 1e-6 for s in survival)
    best = max(range(worth + 1), key=lambda m: speeds[m])
    return best if speeds[best] / speeds[-1] - 1 >= least_gain else len(survival)


def survival_rows(w: dict[str, Tensor], cost: Callable[[int], float]) -> Callable[[Tensor], int]:
    """Rows to verify for one request alone, by the confidence head and what rows cost."""

    def rows(hidden: Tensor) -> int:
        c = confidences(w, hidden)
        survival = [math.prod(c[: j + 1]) for j in range(len(c))]
        return 1 + min(best_budget(survival, cost), sum(s >= 1e-6 for s in survival))

    return rows


@torch.inference_mode()
def speculative_walk(
    model: object,
    c: DrafterConfig,
    w: dict[str, Tensor],
    prompt: list[int],
    tokens: int,
) -> tuple[list[int], list[int]]:
    """Greedy speculative decoding that recomputes everything at every step.

    Returns the output ids and, per verify step, how many drafted tokens were correct.
    """
    ids, correct, _ = verified_walk(model, c, w, prompt, tokens, len)
    return ids, correct


@torch.inference_mode()
def verified_walk(
    model: object,
    c: DrafterConfig,
    w: dict[str, Tensor],
    prompt: list[int],
    tokens: int,
    rows: Callable[[Tensor], int],
) -> tuple[list[int], list[int], list[int]]:
    """The same where `rows` chooses from the block's states how many rows to verify; also returns those numbers."""
    ids = list(prompt)
    states: dict[int, Tensor] = {}
    handles = [
        model.model.layers[i].register_forward_hook(  # type: ignore[attr-defined]
            lambda _m, _a, out, i=i: states.__setitem__(i, (out[0] if isinstance(out, tuple) else out)[0])
        )
        for i in c.target_layer_ids
    ]
    try:
        anchor = int(model(torch.tensor([ids])).logits[0, -1].argmax())  # type: ignore[operator]
        output, correct, verified = [anchor], [], []
        while len(output) < tokens:
            model(torch.tensor([ids]))  # type: ignore[operator]
            context = torch.cat([states[i] for i in c.target_layer_ids], -1)
            block_ids = torch.tensor([anchor] + [c.mask_token_id] * (c.block_size - 1))
            hidden = draft_hidden(c, w, context, model.get_input_embeddings()(block_ids))  # type: ignore[attr-defined]
            verified.append(rows(hidden))
            drafts = model.lm_head(hidden[1:]).argmax(-1).tolist()[: verified[-1] - 1]  # type: ignore[attr-defined]
            logits = model(torch.tensor([[*ids, anchor, *drafts]])).logits[0, len(ids) :]  # type: ignore[operator]
            truth = logits.argmax(-1).tolist()
            run = 0
            while run < len(drafts) and drafts[run] == truth[run]:
                run += 1
            correct.append(run)
            output += [*drafts[:run], truth[run]]
            ids += [anchor, *drafts[:run]]
            anchor = truth[run]
    finally:
        for h in handles:
            h.remove()
    return output[:tokens], correct, verified


def penalised(logits: Tensor, output: list[int], p: dict[str, float], stops: list[int]) -> Tensor:
    """Next-token logits [V] after `output`, from the formulas: frequency and presence subtract, repetition scales."""
    out = logits.clone().float()
    for token in set(output):
        out[token] -= p.get("frequency_penalty", 0.0) * output.count(token) + p.get("presence_penalty", 0.0)
    if len(output) < p.get("min_new_tokens", 0):
        out[stops] = -math.inf
    for token in set(output):
        r = p.get("repetition_penalty", 1.0)
        out[token] = out[token] * r if out[token] < 0 else out[token] / r
    return out


@torch.inference_mode()
def penalised_greedy(model: object, prompt: list[int], tokens: int, p: dict[str, float], stops: list[int]) -> list[int]:
    """Greedy decoding with penalties, one full forward per token; ends at a stop token."""
    output: list[int] = []
    while len(output) < tokens and not (output and output[-1] in stops):
        logits = model(torch.tensor([prompt + output])).logits[0, -1]  # type: ignore[operator]
        output.append(int(penalised(logits, output, p, stops).argmax()))
    return output
