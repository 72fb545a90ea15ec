"""The models written out token by token and head by head, as the papers print them: slow, and independent of the code
they check."""

import math

import torch

from fzero import models


def rms_norm(x, scale, eps):
    return x / math.sqrt(float((x * x).mean()) + eps) * scale


def layer_norm(x, scale, bias, eps):
    mean = x.mean()
    return (x - mean) / math.sqrt(float(((x - mean) ** 2).mean()) + eps) * scale + bias


def turn(x, position, config):
    """RoPE as the product of complex numbers: dims i and i + K/2 are one of them."""
    half = x.shape[0] // 2
    angles = []
    for i in range(half):
        frequency = config.rope_theta ** (-2 * i / x.shape[0])
        s = config.rope_scaling
        if s is not None:
            wavelength = 2 * math.pi / frequency
            if wavelength > s.original_max_len / s.low_freq_factor:
                frequency /= s.factor
            elif wavelength >= s.original_max_len / s.high_freq_factor:
                share = (s.original_max_len / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
                frequency = (1 - share) * frequency / s.factor + share * frequency
        angles.append(position * frequency)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(
        torch.ones(half, dtype=x.dtype), torch.tensor(angles, dtype=x.dtype)
    )
    return torch.cat([turned.real, turned.imag])


def attend(p, h, documents, heads, kv_heads, turned):
    """Attention of one sequence: h and the result are lists of T vectors."""
    q, k, v = ([x @ p[f"w_{n}"] + p.get(f"b_{n}", 0.0) for x in h] for n in "qkv")
    size = q[0].shape[0] // heads
    out = []
    for t in range(len(h)):
        parts = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            query = turned(q[t][head * size : (head + 1) * size], t)
            seen = [s for s in range(t + 1) if documents[s] == documents[t]]
            keys = [turned(k[s][group * size : (group + 1) * size], s) for s in seen]
            weights = torch.softmax(torch.stack([query @ key for key in keys]) / math.sqrt(size), 0)
            parts.append(sum(w * v[s][group * size : (group + 1) * size] for w, s in zip(weights, seen)))
        out.append(torch.cat(parts) @ p["w_o"] + p.get("b_o", 0.0))
    return out


def swiglu(x, gate, up, down):
    a = x @ gate
    return (a / (1 + torch.exp(-a)) * (x @ up)) @ down


def experts(c, p, h):
    """(outputs, tokens per expert, mean probabilities, mean squared log-sum-exp) of one sequence's mixture of
    experts."""
    probabilities = [torch.softmax(x @ p["router"], 0) for x in h]
    chosen = [sorted(range(c.n_experts), key=lambda e, q=q: -float(q[e]))[: c.top_k] for q in probabilities]
    room = math.ceil(c.capacity_factor * len(h) * c.top_k / c.n_experts) if c.capacity_factor else len(h)
    taken, out = [0] * c.n_experts, [torch.zeros_like(x) for x in h]
    for choice in range(c.top_k):  # all first choices find their place before any second one
        for t, x in enumerate(h):
            e = chosen[t][choice]
            taken[e] += 1
            if taken[e] <= room:
                weight = probabilities[t][e] / sum(probabilities[t][i] for i in chosen[t])
                out[t] = out[t] + weight * swiglu(x, p["w_gate"][e], p["w_up"][e], p["w_down"][e])
    load = torch.tensor(taken, dtype=h[0].dtype) / len(h)
    z = sum(torch.logsumexp(x @ p["router"], 0) ** 2 for x in h) / len(h)
    return out, load, sum(probabilities) / len(h), z


def layer_of(tree, i):
    return {name: layer_of(leaf, i) if isinstance(leaf, dict) else leaf[i] for name, leaf in tree.items()}


def sequence(c, params, tokens, documents):
    """(logits [T, V], balance loss, z-loss) of one sequence."""
    is_gpt2, is_moe, is_mlp = (isinstance(c, kind) for kind in (models.GPT2Config, models.MoEConfig, models.MLPConfig))
    x = [params["embed"]["tokens"][t] for t in tokens]
    if is_gpt2:
        x = [v + params["embed"]["positions"][t - documents.index(documents[t])] for t, v in enumerate(x)]
    sums = [torch.zeros(c.n_experts), torch.zeros(c.n_experts), 0.0] if is_moe else []
    for i in range(c.n_layers):
        p = layer_of(params["blocks"], i)
        if is_mlp:
            x = [v + torch.tanh(rms_norm(v, p["scale"], 1e-5) @ p["w_in"]) @ p["w_out"] for v in x]
        elif is_gpt2:
            h = [layer_norm(v, **p["ln_1"], eps=c.norm_eps) for v in x]
            x = [a + b for a, b in zip(x, attend(p["attn"], h, documents, c.n_heads, c.n_heads, lambda v, t: v))]
            for t, v in enumerate(x):
                a = layer_norm(v, **p["ln_2"], eps=c.norm_eps) @ p["mlp"]["w_in"] + p["mlp"]["b_in"]
                a = 0.5 * a * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
                x[t] = v + a @ p["mlp"]["w_out"] + p["mlp"]["b_out"]
        else:
            h = [rms_norm(v, p["norm_1"]["scale"], c.norm_eps) for v in x]
            x = [
                a + b
                for a, b in zip(x, attend(p["attn"], h, documents, c.n_heads, c.n_kv_heads, lambda v, t: turn(v, t, c)))
            ]
            h = [rms_norm(v, p["norm_2"]["scale"], c.norm_eps) for v in x]
            if is_moe:
                out, *seen = experts(c, p["moe"], h)
                sums = [a + b for a, b in zip(sums, seen)]
            else:
                out = [swiglu(v, p["mlp"]["w_gate"], p["mlp"]["w_up"], p["mlp"]["w_down"]) for v in h]
            x = [a + b for a, b in zip(x, out)]
    w = params["embed"]["tokens"] if getattr(c, "tied", False) else params["head"]["w"]
    if is_gpt2:
        x = [layer_norm(v, **params["head"]["norm"], eps=c.norm_eps) for v in x]
    elif not is_mlp:
        x = [rms_norm(v, params["head"]["norm"]["scale"], c.norm_eps) for v in x]
    logits = torch.stack([w @ v for v in x])
    if not is_moe:
        return logits, 0.0, 0.0
    load, prob, z = (total / c.n_layers for total in sums)
    return logits, c.n_experts * (load * prob).sum(), z


def loss(c, params, batch):
    """(sum over the tokens that count of the objective, their number, logits [B, T, V]) of a batch, without dropout."""
    total, all_logits = 0.0, []
    for row in range(batch["tokens"].shape[0]):
        tokens, targets, mask, documents = (batch[n][row].tolist() for n in ("tokens", "targets", "mask", "documents"))
        logits, balance, z = sequence(c, params, tokens, documents)
        all_logits.append(logits)
        for t in range(len(tokens)):
            if mask[t]:
                total = total + torch.logsumexp(logits[t], 0) - logits[t, targets[t]]
                if isinstance(c, models.MoEConfig):
                    total = total + c.balance_coef * balance + c.z_coef * z
    return total, int(batch["mask"].sum()), torch.stack(all_logits)
