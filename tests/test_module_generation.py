"""Models made from modules generate by their own code: by their own cache of keys and values, else computed again."""

import functools
import warnings

import own_modules
import pytest
import ranks
import torch
from close import assert_close
from test_generate_step import by_pages

import fzero
from fzero import generate, models, one_process, optim, random, zero_plan
from fzero.core import pytree
from fzero.models import causal_module, make_module
from fzero.models.causal_module import Forward

pytest.importorskip("transformers")
import huggingface_models as theirs
import transformers as hf

pytestmark = pytest.mark.slow
SIZES, V = theirs.SIZES, theirs.V
CASES = {
    "OPT": theirs.MODELS["OPT"],
    "Bloom": theirs.MODELS["Bloom"],  # whose biases are those of distances
    "Gemma3": theirs.MODELS["Gemma3"],  # windows in most layers
    "DeepSeek-V3": lambda: hf.DeepseekV3Config(  # two stacks, and latents
        **{**theirs.MODELS["DeepSeek-V3"]().to_diff_dict(), "num_hidden_layers": 4, "first_k_dense_replace": 2}
    ),
    "Mamba": lambda: hf.MambaConfig(vocab_size=V, hidden_size=16, num_hidden_layers=2, state_size=4),
    "LFM2": lambda: hf.Lfm2Config(**{**SIZES, "num_hidden_layers": 2}, layer_types=["conv", "full_attention"]),
}
AGAIN = ("Mamba", "LFM2")  # those with another cache


@functools.cache
def made(name, dtype=torch.float64):
    """(fzero's model of a module of transformers, its parameters, the module)."""
    config = CASES[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that are no stack
        model = fzero.from_huggingface(config, seed=3)
        model.traits.causal()
    module, _ = make_module(config, "", None, 3)
    return model, models.init_params(model, random.key(0), dtype), module.to(dtype).eval()


def text(length, seed=1):
    return torch.randint(1, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def warned(name):
    again = name in AGAIN
    return pytest.warns(UserWarning, match="computes all before it again") if again else warnings.catch_warnings()


@pytest.mark.parametrize("name", CASES)
def test_logits_of_ragged_chunks_are_those_of_a_whole_pass(name):
    model, params, module = made(name)
    rows = [text(length, length) for length in (31, 5, 18, 1)]
    with theirs.Widened(), torch.no_grad(), warned(name):
        pairs = list(zip(rows, by_pages(model, zero_plan(0, model, one_process()), params, rows, 0)))
        for row, logits in pairs:
            assert_close(logits, module(torch.tensor([row]), use_cache=False).logits[0], rtol=1e-9, atol=1e-11)


@pytest.fixture
def fed(monkeypatch):
    """A list that gets the number of tokens of each call of a module's layers."""
    counts, enter = [], Forward.enter
    monkeypatch.setattr(
        Forward, "enter", lambda self, outside: (counts.append(self.group.tokens.numel()), enter(self, outside))
    )
    return counts


@pytest.mark.parametrize("name", ["OPT", "Bloom", "Gemma3"])
def test_greedy_texts_are_those_of_transformers_generate(name, fed):
    model, params, module = made(name, torch.float32)
    fed.clear()
    start = text(9)
    ids = [(*start, *text(n, n)) for n in (4, 2, 8, 1)]
    prompts = [generate.Prompt(row, generate.Sampling(0.0, max_tokens=9), i) for i, row in enumerate(ids)]
    # Pages for two of the four: later ones wait, share the first pages, or are put off and computed again.
    options = generate.GenerateOptions(rows=3, tokens=8, pages=14, page_tokens=4)
    completions = list(generate.completions(model, params, prompts, options=options))
    assert {c.number for c in completions} == {0, 1, 2, 3}
    for completion in completions:
        row = torch.tensor([ids[completion.number]])
        with torch.no_grad():
            expected = module.generate(row, do_sample=False, max_new_tokens=9, eos_token_id=None, pad_token_id=0)
        assert completion.ids == tuple(expected[0, row.shape[1] :].tolist())
    assert sum(fed) <= sum(map(len, ids)) + 4 * 9  # each token once; shared ones and the last ones not at all


def by_rank(mesh, stage):
    """(what a rank draws, from the parameters of a training state at rest, the entries of its pages); ranks of dp have
    unlike rows."""
    model = fzero.from_huggingface(CASES["OPT"](), seed=3, batch=theirs.batch_of("OPT", 0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "OPTForCausalLM: tp=2 splits")
        plan = zero_plan(stage, model, mesh)
        state = fzero.init_state(model, optim.sgd(0.1), plan, seed=0)
        prompts = [generate.Prompt(text(3 + 5 * i), generate.Sampling(0.0, max_tokens=4 + i), i) for i in range(3)]
        out = generate.completions(model, state.params, prompts, plan=plan)
        texts = {completion.number: completion.ids for completion in out}
        return texts, generate.page_spec(model, plan, 1).entries


@pytest.mark.parametrize(("sizes", "stage"), [({"dp": 2}, 3), ({"tp": 2}, 1)], ids=str)
def test_ranks_draw_what_one_process_does(sizes, stage):
    (first, entries), (second, _) = ranks.run(2, by_rank, stage, mesh=sizes)
    texts, all_entries = by_rank(one_process(), 0)
    assert len(first) + len(second) == (3 if "dp" in sizes else 6)
    assert {**first, **second} == texts
    split = sizes.get("tp", 1)  # heads
    assert [[(heads * split, size) for heads, size in layer] for layer in entries] == [*map(list, all_entries)]


def test_a_cache_that_tp_spoils_is_not_used(monkeypatch):
    """A planted mistake: under tp, the keys of the row before."""
    model = fzero.from_huggingface(CASES["Gemma3"](), seed=3, batch=theirs.batch_of("Gemma3", 0))
    causal, keys = model.traits.causal(), causal_module.PagedKeys.exchange
    monkeypatch.setattr(causal_module.PagedKeys, "exchange", lambda self, *pair: keys(self, *pair).roll(1, 2))
    assert causal.paging(fzero.fake_mesh({"tp": 2})).reason.endswith("gives other logits with its cache than without")
    assert causal.paging(one_process()).entries and not causal.paging(fzero.fake_mesh({"tp": 2})).entries


def test_a_module_of_ones_own_without_a_cache_is_computed_again(fed):
    torch.manual_seed(0)
    module = own_modules.Transformer().double()
    model = fzero.from_module(module, own_modules.token_loss)
    params = models.init_params(model, random.key(0), torch.float64)
    rows = [torch.randint(0, own_modules.V, (n,)).tolist() for n in (11, 4)]
    with pytest.warns(UserWarning, match="again: it has no cache of keys and values"):
        parts = by_pages(model, zero_plan(0, model, one_process()), params, rows, 0)
    for row, logits in zip(rows, parts):
        assert_close(logits, module(torch.tensor([row]))[0], rtol=1e-9, atol=1e-11)


def test_factors_of_lora_are_in_what_is_generated():
    model, params, _ = made("OPT")
    adapted = models.lora(model, rank=2, targets="q_proj/weight")
    own = models.init_params(adapted, random.key(1), torch.float64)
    own = pytree.map_named(lambda name, x: 0.3 * torch.randn_like(x) if "_lora_" in name else x, own)
    row, plan = text(9), zero_plan(0, model, one_process())
    ours = by_pages(adapted, zero_plan(0, adapted, one_process()), own, [row], 0)[0]
    merged = by_pages(model, plan, models.merge(adapted, own), [row], 0)[0]
    assert_close(ours, merged, rtol=1e-9, atol=1e-11)
    assert (ours - by_pages(model, plan, params, [row], 0)[0]).abs().max() > 1e-3


def test_a_cache_that_gives_other_logits_is_not_used(monkeypatch):
    """A planted mistake: the keys of the row before."""
    keys = causal_module.PagedKeys.exchange
    monkeypatch.setattr(causal_module.PagedKeys, "exchange", lambda self, *pair: keys(self, *pair).roll(1, 2))
    model = fzero.from_huggingface(CASES["OPT"](), seed=3)
    paging = model.traits.causal().paging(one_process())
    assert not paging.entries
    assert paging.reason == "OPTForCausalLM gives other logits with its cache than without"


def of_module(*layers):
    return fzero.from_module(torch.nn.Sequential(*layers), lambda call, batch: call(batch["x"]).sum())


LONG = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 8}
LONG |= {"short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0]}
REFUSED = {
    # Frequencies that depend on the length of a text, so that no key stays what it was.
    "the buffer model.rotary_emb.inv_freq|sets '.*inv_freq'": lambda: fzero.from_huggingface(
        hf.LlamaConfig(**SIZES, rope_parameters=LONG)
    ),
    "BertForMaskedLM: a token sees the ones after it": lambda: fzero.from_huggingface(
        theirs.MODELS["BERT"](), task="masked"
    ),
    r"it raises RuntimeError: .*; a model that generates takes tokens": lambda: of_module(torch.nn.Linear(2, 2)),
    r"returns \[1, 10, 8, 2\] for tokens \[1, 10\], and has no logits": lambda: of_module(
        torch.nn.Embedding(V, 16), torch.nn.Unflatten(2, (8, 2))
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_module_that_says_no_text_is_refused_by_name(message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is trained whole
        model = REFUSED[message]()
    params = models.init_params(model, random.key(0))
    with pytest.raises(ValueError, match=message):
        list(generate.completions(model, params, [generate.Prompt((1, 2))]))


def test_canonical_kernels_are_refused():
    model, params, _ = made("OPT", torch.float32)
    with pytest.raises(ValueError, match="OPTForCausalLM is computed by code of its own"):
        list(
            generate.completions(
                model, params, [generate.Prompt((1,))], options=generate.GenerateOptions(kernels="canonical")
            )
        )
