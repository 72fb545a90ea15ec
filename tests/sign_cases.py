"""A sum by signs written out, block by block."""

import torch


def coded(x, on, scale):
    """What a block [n] of which the elements `on` are not masked is sent as."""
    size = x[on].abs().mean() if scale == "mean" else x[on].square().mean().sqrt()
    return size * torch.where(x >= 0, torch.ones_like(x), -torch.ones_like(x)) * on


def sign_sum(n, terms, e, f, mask, scale, inside=1):
    """(sum by signs of terms [n, layers, ...], new errors e like them, new f [layers, ...]) as the paper has it, each
    term of which is on so many ranks `inside` of a node."""
    layers, shape, parts = terms.shape[1], terms.shape[2:], n * inside
    x, new = (
        (terms + e).view(n, layers, parts, -1),
        torch.zeros(n, layers, parts, terms[0, 0].numel() // parts).double(),
    )
    served, y = torch.zeros_like(new[0]), f.view(layers, parts, -1).clone()
    on = mask.view(layers, parts, -1)
    for layer in range(layers):
        for part in range(parts):
            at = on[layer, part]
            for r in range(n):
                one = x[r, layer, part]
                sent = coded(one, at, scale)
                new[r, layer, part] = (one - sent) * at
                y[layer, part] += sent
            served[layer, part] = coded(y[layer, part], at, scale)
    left = (y - served) * on
    return served.view(layers, *shape), new.view(n, layers, *shape), left.view(layers, *shape)


def stack(leaf, name):
    return leaf if name.startswith("blocks/") else leaf[None]
