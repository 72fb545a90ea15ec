"""Canonical sums: one hash of parameters, optimizer state and losses, on every mesh, at every stage, however gradients
are accumulated."""

import functools
import hashlib

import pytest
import ranks
import torch
from zero_cases import train, whole

import fzero
from fzero.core import precision, pytree

POLICIES = {"bf16": precision.bf16, "fp32": precision.fp32}
PARTS = 4  # micro-batches of the global batch, on every mesh
STEPS = 4


def digest(state, log):
    """SHA-256 of the state's tensors by name, and of the losses."""
    h = hashlib.sha256()
    for name, leaf in sorted(pytree.named_leaves(state).items()):
        h.update(f"{name} {leaf.dtype} {list(leaf.shape)}".encode())
        h.update(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    h.update(repr([row[:2] for row in log]).encode())
    return h.hexdigest()


def run(mesh, policy, stage, reduce="canonical"):
    state, specs, log = train(
        mesh,
        "gpt2",
        "clipped adam",
        stage,
        PARTS,
        plan_options={"reduce": reduce},
        steps=STEPS,
        policy=POLICIES[policy](),
        rows=8,
        dropout=0.1,
    )
    return whole(state, specs, mesh), log


def digests(mesh, policy, stages, **options):
    return [digest(*run(mesh, policy, stage, **options)) for stage in stages]


@functools.cache
def alone(policy):
    return digests(fzero.one_process(), policy, (0, 3))


@pytest.mark.parametrize("policy", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("n", (pytest.param(2, marks=pytest.mark.exhaustive), 4))
def test_one_hash(n, policy):
    first, last = alone(policy)
    assert first == last
    for by_rank in ranks.run(n, digests, policy, (0, 1, 2, 3), mesh={"dp": n}, timeout_s=300):
        assert by_rank == [first] * 4


def test_fast_sums_differ_in_their_bits():
    """The hash sees the last bit: the fast sums of four micro-batches are another order."""
    assert digests(fzero.one_process(), "fp32", (0,), reduce="fast") != alone("fp32")[:1]


def test_another_hash_with_another_seed_of_the_data():
    state, log = run(fzero.one_process(), "fp32", 0)
    assert digest(state, log) == alone("fp32")[0]
    leaf = pytree.leaves(state.params)[0]
    leaf.view(-1)[0] = torch.nextafter(leaf.view(-1)[0], torch.tensor(9.0))
    assert digest(state, log) != alone("fp32")[0]
