"""Decoders that fzero has no functions of, from folders and by command: transformers' own code computes them, and its
losses, steps and folders are theirs."""

import json
import sys
import warnings

import chats
import pytest
import ranks
import torch
from close import assert_close

pytest.importorskip("transformers")
import huggingface_models as theirs
import transformers as hf

import fzero
from fzero import models, optim
from fzero.checkpoint import convert, huggingface, save_decoder
from fzero.checkpoint.convert.transformers_models import decoder_of
from fzero.core import pytree
from fzero.models import Ctx, read_decoder, with_vocab_size
from fzero.models.transformers_module import name_of_scored
from fzero.run import run_folder, weights
from fzero.train.state import gathered

hf.logging.disable_progress_bar()  # they are no part of what fzero writes

slow = pytest.mark.slow
V, T, STEPS, RATE = 64, 8, 3, 0.5
TRUNK = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {
    **TRUNK,
    "intermediate_size": 32,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OLD = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, **STILL}
DECODERS = {
    "Phi": lambda: hf.PhiConfig(**{**SIZES, "num_key_value_heads": 4}),
    "StableLM": lambda: hf.StableLmConfig(**SIZES),
    "Granite": lambda: hf.GraniteConfig(**SIZES, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5),
    "OLMo": lambda: hf.OlmoConfig(**SIZES),
    "OLMo3": lambda: hf.Olmo3Config(**SIZES, sliding_window=4),
    "Cohere": lambda: hf.CohereConfig(**SIZES),
    "GPT-NeoX": lambda: hf.GPTNeoXConfig(**TRUNK, intermediate_size=32, max_position_embeddings=32),
    "Falcon": lambda: hf.FalconConfig(**TRUNK),
    "GPT-J": lambda: hf.GPTJConfig(**OLD, rotary_dim=4),
    "GPT-Neo": lambda: hf.GPTNeoConfig(
        vocab_size=V,
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    "GPTBigCode": lambda: hf.GPTBigCodeConfig(**OLD),
    "StarCoder2": lambda: hf.Starcoder2Config(**SIZES, sliding_window=4),
    "Nemotron": lambda: hf.NemotronConfig(**SIZES),
    "GLM-4": lambda: hf.Glm4Config(**SIZES, head_dim=8),
    "GraniteMoE": lambda: hf.GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "OPT": lambda: hf.OPTConfig(**TRUNK, ffn_dim=32, word_embed_proj_dim=16, dropout=0.0),
    "Bloom": lambda: hf.BloomConfig(vocab_size=V, hidden_size=16, n_layer=2, n_head=4),
    "MPT": lambda: hf.MptConfig(vocab_size=V, d_model=16, n_layers=2, n_heads=4, max_seq_len=32),
}
MIXED = ("OPT", "Bloom", "MPT")  # whose code does not tell documents apart
OFTEN = ("Phi", "GraniteMoE", "OPT")  # one of each kind; the others are exhaustive


def saved(name, folder, **entries):
    """The folder of a decoder as transformers saves it."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = hf.AutoModelForCausalLM.from_config(DECODERS[name](), attn_implementation="eager").eval()
        for leaf in module.parameters():  # biases and norms too
            leaf.data += 0.02 * torch.randn(leaf.shape)
    module.save_pretrained(folder)
    return folder


def rows(seed, count=4):
    """Texts of T + 1 tokens."""
    return torch.randint(1, V, (count, T + 1), generator=torch.Generator().manual_seed(seed))


def by_transformers(folder):
    """(the losses of STEPS steps, the parameters after them) by torch's SGD in float64 of transformers' module."""
    module = hf.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="batched_mm").double().train(False)
    sgd, log = torch.optim.SGD(module.parameters(), lr=RATE), []
    for i in range(STEPS):
        tokens = rows(i)
        with theirs.Widened():
            nats = module(tokens).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(nats, tokens[:, 1:].flatten())
            loss.backward()
        sgd.step()
        sgd.zero_grad()
        log.append(float(loss.detach()))
    return log, {name: leaf.detach() for name, leaf in module.named_parameters()}


def by_fzero(mesh, folder, stage, out=None):
    """(the losses of STEPS steps, the whole parameters after them by name), exported to `out` if it is given."""
    source = convert.open_source(folder)
    model = models.build(source.config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "[A-Za-z0-9]+: tp=2 splits")
        plan = fzero.zero_plan(stage, model, mesh, policy="fp64")
    tx, log = optim.sgd(RATE), []
    state = fzero.init_state(convert.load(source), tx, plan, seed=0)
    step = fzero.make_train_step(model, tx, plan, micro_batches=2 // mesh["dp"].size)
    model.prepare({"tokens": rows(0)[:, :-1]}, Ctx())  # looks at what a token sees, in float32
    for i in range(STEPS):
        batch = {"tokens": rows(i)[:, :-1], "targets": rows(i)[:, 1:]}
        with theirs.Widened():
            state, metrics = step(state, fzero.local_batch(batch, mesh))
        log.append(float(metrics.loss))
    whole = pytree.map_named(lambda name, leaf: gathered(leaf, plan.leaves[name].params, plan.mesh, name), state.params)
    if out is not None and mesh.rank == 0:
        save_decoder(out, source.config, huggingface.in_memory(whole))
    return log, pytree.named_leaves(whole)


def named_by_them(config, leaves):
    """The parameters by transformers' names."""
    found = {}
    for leaf, names in decoder_of(config).sources.items():
        parts = leaves[leaf] if leaf.startswith("blocks") else leaves[leaf][None]
        found |= dict(zip(names, parts))
    return found


def tiers(*often):
    return [pytest.param(name, marks=slow if name in often else pytest.mark.exhaustive) for name in DECODERS]


@pytest.mark.parametrize("name", tiers(*OFTEN))
def test_steps_and_folders_are_those_of_transformers(name, tmp_path):
    folder = saved(name, tmp_path / "theirs")
    expected_log, expected = by_transformers(folder)
    log, leaves = by_fzero(fzero.one_process(), folder, 0, tmp_path / "ours")
    assert_close(log, expected_log, rtol=1e-10)
    found = named_by_them(convert.open_source(folder).config, leaves)
    assert found.keys() == expected.keys()
    assert_close({name: found[name] for name in expected}, expected, rtol=1e-10, atol=1e-12)
    back = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(back).__name__ == type(hf.AutoModelForCausalLM.from_pretrained(folder)).__name__
    for key, leaf in back.named_parameters():
        assert torch.equal(leaf.double(), found[key]), key
    before, after = (json.loads((one / "config.json").read_text()) for one in (folder, tmp_path / "ours"))
    assert {k: v for k, v in after.items() if "dtype" not in k} == {k: v for k, v in before.items() if "dtype" not in k}


def nested(leaves):
    """The tree of leaves by their names."""
    tree = {}
    for name, leaf in leaves.items():
        *folders, last = name.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = leaf
    return tree


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # which peft asks for
@pytest.mark.parametrize("name", [case for case in tiers("Phi", "OPT") if case.values != ("GraniteMoE",)])
def test_lora_has_the_losses_and_factors_of_peft(name, tmp_path):
    """Which wraps no router; factors of all linear layers, b not 0, by AdamW with decay."""
    peft = pytest.importorskip("peft")
    folder = saved(name, tmp_path / "theirs")
    source, draw = convert.open_source(folder), torch.Generator().manual_seed(1)
    leaves = pytree.named_leaves(convert.load(source))
    names = decoder_of(source.config).sources
    linear = [leaf for leaf, x in leaves.items() if leaf.startswith("blocks") and x.dim() == 3 and "norm" not in leaf]
    for leaf in linear:
        layers, n_out, n_in = leaves[leaf].shape
        leaves |= {
            f"{leaf}_lora_a": 0.3 * torch.randn(layers, 3, n_in, generator=draw),
            f"{leaf}_lora_b": 0.3 * torch.randn(layers, n_out, 3, generator=draw),
        }
    model = models.lora(models.build(source.config), 3, 5.0, f"^({'|'.join(linear)})$")
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy="fp64", frozen=models.frozen_leaves(model.config))
    tx = optim.adamw(0.01, weight_decay=0.1)
    state = fzero.init_state(nested(leaves), tx, plan, seed=0)
    model.prepare({"tokens": rows(0)[:, :-1]}, Ctx())
    step = fzero.make_train_step(model, tx, plan, micro_batches=2)

    module = hf.AutoModelForCausalLM.from_pretrained(folder).double()
    targets = [one.removesuffix(".weight") for leaf in linear for one in names[leaf]]
    wrapped = peft.get_peft_model(module, peft.LoraConfig(r=3, lora_alpha=5.0, target_modules=targets)).double()
    wrapped.train(False)
    parameters, factors = dict(wrapped.named_parameters()), {}
    for leaf in linear:
        for i, one in enumerate(names[leaf]):
            for end in "ab":
                path = f"base_model.model.{one.removesuffix('.weight')}.lora_{end.upper()}.default.weight"
                factors[f"{leaf}_lora_{end}", i] = parameters[path]
                parameters[path].data.copy_(leaves[f"{leaf}_lora_{end}"][i])
    adamw = torch.optim.AdamW(factors.values(), lr=0.01, weight_decay=0.1)
    for i in range(STEPS):
        tokens = rows(i)
        with theirs.Widened():
            nats = wrapped(tokens).logits[:, :-1].flatten(0, 1)
            expected = torch.nn.functional.cross_entropy(nats, tokens[:, 1:].flatten())
            expected.backward()
            state, metrics = step(state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
        adamw.step()
        adamw.zero_grad()
        assert_close(metrics.loss, expected.detach(), rtol=1e-10)
    after = pytree.named_leaves(state.params)
    found = {key: after[key[0]][key[1]] for key in factors}
    assert_close(found, {key: leaf.detach() for key, leaf in factors.items()}, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", tiers("GPT-NeoX", "OPT"))
def test_documents_in_a_row_have_the_losses_that_they_have_alone(name, tmp_path):
    folder = saved(name, tmp_path / "theirs")
    source = convert.open_source(folder)
    model, params, tokens = models.build(source.config), convert.load(source), rows(0)
    documents = torch.tensor([[0] * 3 + [1] * 5] * 4)
    counts = torch.ones(4, T, dtype=torch.bool)
    counts[:, 2] = False  # the first document has three tokens, whose last is not to be told
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "documents": documents, "mask": counts}
    if name in MIXED:
        with pytest.raises(ValueError, match=r"mixes the documents of a row.*data.within_documents=false"):
            models.loss(model, params, batch, Ctx())
        return
    module = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        first, second = tokens[:, :3], tokens[:, 3:]
        expected = 8 * module(first, labels=first).loss + 20 * module(second, labels=second).loss
    found = models.loss(model, params, batch, Ctx())
    assert int(found.num_tokens) == 28
    assert_close(found.total, expected, rtol=1e-5)


# ---- heads of scores ----

LENGTHS = [8, 5, 3, 8]  # of texts that fill rows of T tokens, the rest padded with 0


SCORED = [name for name in DECODERS if name_of_scored(DECODERS[name]())]  # of which transformers has such a head


def scored(name, folder, labels):
    """The folder of a decoder with a head of scores as transformers saves it."""
    config = DECODERS[name]()
    config.num_labels, config.pad_token_id = labels, 0
    with torch.random.fork_rng():
        torch.manual_seed(5)
        hf.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def texts_with_classes():
    """(a batch of texts with classes, the classes)."""
    there = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    last, classes = torch.tensor(LENGTHS)[:, None] - 1 == torch.arange(T), torch.tensor([2, 0, 1, 1])
    return {"tokens": rows(7)[:, :-1] * there, "targets": classes[:, None] * last, "mask": last}, classes


def loss_and_gradients(folder, batch):
    """(the model, its parameters, the loss and the gradients by transformers' names) in float64 of a folder's model."""
    source = convert.open_source(folder)
    model = models.build(source.config)
    params = pytree.map(lambda leaf: leaf.double().requires_grad_(), convert.load(source))
    model.prepare(batch, Ctx())  # looks at what a token sees, in float32
    with theirs.Widened():
        out = models.loss(model, params, batch, Ctx(dtype=torch.float64))
    named = pytree.named_leaves(params)
    found = dict(zip(named, torch.autograd.grad(out.total, list(named.values()))))
    return model, params, out, named_by_them(source.config, found)


def module_of(folder):
    cls = hf.AutoModelForSequenceClassification
    return cls.from_pretrained(folder, experts_implementation="batched_mm").double().train(False)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "Phi" else slow if n == "OPT" else pytest.mark.exhaustive) for n in SCORED],
)
def test_classes_have_the_losses_and_gradients_of_transformers(name, tmp_path):
    folder, (batch, classes) = scored(name, tmp_path / "theirs", 3), texts_with_classes()
    model, params, out, found = loss_and_gradients(folder, batch)
    module = module_of(folder)
    with theirs.Widened():
        logits = module(batch["tokens"], attention_mask=(batch["tokens"] != 0).long()).logits
        loss = torch.nn.functional.cross_entropy(logits, classes, reduction="sum")
    loss.backward()
    assert int(out.num_tokens) == 4
    assert_close(out.total.detach(), loss.detach(), rtol=1e-10)
    expected = {
        key: leaf.grad if leaf.grad is not None else 0 * leaf.detach() for key, leaf in module.named_parameters()
    }
    assert found.keys() == expected.keys() and "score.weight" in found
    assert_close(found, {key: expected[key] for key in found}, rtol=1e-10, atol=1e-12)
    assert model.config.labels == tuple(module.config.id2label.values()) and model.config.pad == 0
    save_decoder(tmp_path / "ours", model.config, huggingface.in_memory(pytree.map(torch.detach, params)))
    back = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    assert type(back) is type(module) and (back.config.id2label, back.config.pad_token_id) == (
        module.config.id2label,
        0,
    )
    for key, leaf in module.named_parameters():
        assert torch.equal(dict(back.named_parameters())[key], leaf), key


@slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "GPT-NeoX" else pytest.mark.exhaustive) for n in SCORED if n not in MIXED]
)
def test_rewards_have_the_losses_and_gradients_of_transformers(name, tmp_path):
    folder, tokens = scored(name, tmp_path / "theirs", 1), rows(8, 2)[:, :-1]
    last = torch.tensor([2, T - 1])  # a row has the chosen answer, of three tokens, and the rejected one, of five
    mask = torch.zeros(2, T, dtype=torch.bool)
    mask[:, last] = True
    batch = {"tokens": tokens, "targets": torch.zeros_like(tokens), "mask": mask}
    _, _, out, found = loss_and_gradients(folder, batch | {"documents": torch.tensor([[0] * 3 + [1] * 5] * 2)})
    module = module_of(folder)
    with theirs.Widened():
        chosen, rejected = module(tokens[:, :3]).logits, module(tokens[:, 3:]).logits
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).sum()
    loss.backward()
    assert int(out.num_tokens) == 2
    assert_close(out.total.detach(), loss.detach(), rtol=1e-10)
    expected = {
        key: leaf.grad if leaf.grad is not None else 0 * leaf.detach() for key, leaf in module.named_parameters()
    }
    assert_close(found, {key: expected[key] for key in found}, rtol=1e-10, atol=1e-12)


@slow
def test_a_decoder_without_a_class_of_scores_has_none(tmp_path):
    config = read_decoder(json.loads(hf.CodeGenConfig(**OLD, rotary_dim=4).to_json_string()), "config.json")
    with pytest.raises(ValueError, match=r"no class of codegen with a head of scores.*train it on chats or pairs"):
        models.classify(models.build(config), ["a", "b"])
    config = hf.OPTConfig(**TRUNK, ffn_dim=32, word_embed_proj_dim=8)
    config = read_decoder(json.loads(config.to_json_string()), "config.json")
    with pytest.raises(ValueError, match=r"OPTForSequenceClassification: its head is no linear layer `score` of 16"):
        models.reward(models.build(config))


# ---- on two ranks ----

TWO = [
    pytest.param("GPT-NeoX", {"tp": 2}, 0, marks=slow),
    pytest.param("Cohere", {"tp": 2}, 0, marks=pytest.mark.exhaustive),
    pytest.param("StableLM", {"tp": 2}, 0, marks=pytest.mark.exhaustive),
    pytest.param("Falcon", {"dp": 2}, 3, marks=slow),
    pytest.param("StableLM", {"pp": 2}, 2, marks=slow),
]


@pytest.mark.parametrize(("name", "sizes", "stage"), TWO)
def test_two_ranks_equal_one_process(name, sizes, stage, tmp_path):
    folder = saved(name, tmp_path / "theirs")
    log, leaves = by_fzero(fzero.one_process(), folder, 0)
    for found, parts in ranks.run(2, by_fzero, folder, stage, mesh=sizes):
        assert_close(found, log, rtol=1e-10)
        assert_close(parts, leaves, rtol=1e-10, atol=1e-12)
    model = models.build(convert.open_source(folder).config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "[A-Za-z0-9]+: tp=2 splits")
        plan = fzero.zero_plan(0, model, fzero.fake_mesh({"tp": 2}))
    if "tp" in sizes:
        assert sum("tp" in leaf.params.axes for leaf in plan.leaves.values()) >= 3


@slow
def test_dropout_is_drawn_from_the_key_of_the_state(tmp_path):
    config = hf.OPTConfig(**TRUNK, ffn_dim=32, word_embed_proj_dim=16, dropout=0.3)
    hf.OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    source = convert.open_source(tmp_path / "opt")
    model, params = models.build(source.config), convert.load(source)
    batch = {"tokens": rows(0)[:, :-1], "targets": rows(0)[:, 1:]}
    key = fzero.random.key(0)
    one, again, plain = (models.loss(model, params, batch, Ctx(key=k)).total for k in (key, key, ()))
    assert one == again != plain
    half = [
        models.loss(model, params, {**{k: x[i : i + 2] for k, x in batch.items()}, "first": i}, Ctx(key=key)).total
        for i in (0, 2)
    ]
    assert_close(sum(half), one, rtol=1e-5)
    module = hf.OPTForCausalLM.from_pretrained(tmp_path / "opt").eval()
    assert_close(plain / (4 * T), module(rows(0), labels=rows(0)).loss.detach(), rtol=1e-5)


# ---- what is refused ----

PHI = {"model_type": "phi", "architectures": ["PhiForCausalLM"]}
REFUSED = {
    "model_type is None": {"architectures": ["PhiForCausalLM"]},
    "is an encoder-decoder.*from_huggingface.*from_module": {"model_type": "bart", "is_encoder_decoder": True},
    "t5 is no decoder|encoder-decoder": {"model_type": "t5"},
    "of bert fzero reads BertLMHeadModel.*from_huggingface": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"],
    },
    "quantization_config is .*save the model without": {**PHI, "quantization_config": {"bits": 4}},
    "'own', which transformers .* auto_map names code of the folder's own": {
        "model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"},
    },
    "model_type is 'fhi', which transformers": {"model_type": "fhi"},
    "of phi fzero reads PhiForCausalLM and PhiForSequenceClassification": {
        **PHI, "architectures": ["PhiForTokenClassification"],
    },
    "vit is no decoder": {"model_type": "vit"},
    "more than tokens": {"model_type": "gemma3"},
    "transformers takes no such phi": {**PHI, "num_hidden_layers": "two"},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_decoder_is_refused_by_name(message):
    with pytest.raises(ValueError, match=rf"^c\.json: .*({message})"):
        read_decoder(REFUSED[message], "c.json")


def test_its_tables_do_not_grow():
    with pytest.raises(ValueError, match=r"PhiForCausalLM.*resize_token_embeddings\(52000\) in transformers, save"):
        with_vocab_size(read_decoder(PHI, "c.json"), 52_000)


def test_without_transformers_the_remedy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"phi has no functions of fzero's own.*pip install 'transformers>=5'"):
        read_decoder(PHI, "c.json")


@slow
def test_what_sees_later_tokens_or_has_no_layers_alike_is_refused(tmp_path):
    bert = hf.BertConfig(**TRUNK, intermediate_size=32)
    config = read_decoder(json.loads(bert.to_json_string()), "config.json")
    for more in ({}, {"documents": torch.zeros(4, T + 1, dtype=torch.int64)}):
        with pytest.raises(ValueError, match=r"bert\.encoder\.layer\.0 a token sees the ones after it.*from_module"):
            models.build(config).prepare({"tokens": rows(0), **more}, Ctx())
    xlnet = hf.XLNetConfig(vocab_size=V, d_model=16, n_layer=2, n_head=4, d_inner=32)
    xlnet = read_decoder(json.loads(xlnet.to_json_string()), "config.json")
    with pytest.raises(ValueError, match=r"transformer\.layer\.0 is called with \[9, 1, 16\] for tokens \[1, 9\]"):
        models.build(xlnet).prepare({"tokens": rows(0)}, Ctx())
    with pytest.raises(ValueError, match=r"BertForSequenceClassification: its head is no linear layer `score`"):
        models.classify(models.build(config), ["a", "b"])
    phi = {**json.loads(DECODERS["Phi"]().to_json_string()), "is_causal": False}
    with pytest.raises(ValueError, match=r"model\.layers\.0 a token sees the ones after it"):
        models.build(read_decoder(phi, "config.json")).prepare({"tokens": rows(0)}, Ctx())
    config = read_decoder(json.loads(hf.RwkvConfig(**{**TRUNK, "num_attention_heads": None}).to_json_string()), "c")
    with pytest.raises(ValueError, match=r"cannot be cut into layers.*from_huggingface trains it whole"):
        models.build(config)


# ---- by command ----


def chat_folder(folder, config):
    """A folder with a decoder of bytes that has a chat template, and the file of conversations beside it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    chats.tokenizer().save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text(chats.TEMPLATE)
    chats.chat_file(folder.parent / "chat.jsonl", 12)
    return folder


BYTES = {**TRUNK, "vocab_size": 260, "intermediate_size": 32, "max_position_embeddings": 96}


def expect_same_logits(run, out):
    """What transformers computes with the exported folder is what the run computes."""
    trained, batch = weights.load(run, wide=True), {"tokens": torch.arange(40)[None]}
    params = trained.params
    with torch.no_grad():
        expected = models.logits(trained.model, params, batch)
        found = hf.AutoModelForCausalLM.from_pretrained(out).eval()(batch["tokens"]).logits
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_folder_of_phi_is_fine_tuned_and_exported(tmp_path, fz):
    folder, run, out = chat_folder(tmp_path / "phi", hf.PhiConfig(**BYTES)), tmp_path / "run", tmp_path / "out"
    start = ["finetune", "--init", folder, "--data", tmp_path / "chat.jsonl", *chats.FLAGS, "--steps", 2]
    code, said, err = fz(*start, "--out", run)
    assert (code, err) == (0, "")
    assert "PhiForCausalLM has no functions of fzero's own: the code of transformers" in said
    assert chats.column(run, "loss")[1] < chats.column(run, "loss")[0]
    assert fz("export", run, "--out", out)[::2] == (0, "")
    expect_same_logits(run, out)


@slow
def test_lora_of_gpt_neox_resumes_merges_and_learns_preferences(tmp_path, fz):
    folder, run, again = chat_folder(tmp_path / "neox", hf.GPTNeoXConfig(**BYTES)), tmp_path / "run", tmp_path / "again"
    start = ["finetune", "--init", folder, "--data", tmp_path / "chat.jsonl", *chats.FLAGS]
    start += ["--lora", "rank=4", "--steps", 4]
    assert fz(*start, "--out", run, "--zero", 3, "--remat", "full", "--offload", "opt=host")[::2] == (0, "")
    assert fz(*start, "--out", again, "--stop-at", 2)[::2] == (0, "")
    assert fz("finetune", "--resume", "--out", again)[::2] == (0, "")
    assert_close(chats.column(again, "loss"), chats.column(run, "loss"), rtol=1e-6)
    code, said, err = fz("replay", run, "--step", 2)  # from the folder, as there is no checkpoint before
    assert (code, err) == (0, "") and "from its start" in said
    config = run_folder.read_config(run)
    assert "attention/query_key_value" in config.model.targets and "dense_4h_to_h" in config.model.targets
    code, said, err = fz("sample", run, "--prompt", "1+1", "--max-new-tokens", 3, "--temperature", 0)
    assert (code, err) == (0, "") and said.startswith("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n")
    code, said, err = fz("config", "--config", run / "config.json")
    assert (code, err) == (0, "") and 'family = "transformers"' in said
    assert fz("export", run, "--out", tmp_path / "merged")[::2] == (0, "")
    expect_same_logits(run, tmp_path / "merged")
    code, _, err = fz("export", run, "--out", tmp_path / "adapter", "--adapter")
    assert code == 2 and "transformers' own layers" in err

    chats.pair_file(tmp_path / "pairs.jsonl", 12)
    pairs = ["--data", tmp_path / "pairs.jsonl", *chats.FLAGS, "--steps", 2]
    assert fz("finetune", "--objective", "dpo", "--init", folder, *pairs, "--out", tmp_path / "dpo")[::2] == (0, "")
    assert chats.column(tmp_path / "dpo", "loss")[0] == pytest.approx(0.693147, abs=1e-5)
    for more, message in ((["--lora", "rank=4", "--quantize", "nf4"], "weights in codes are for fzero's own models"),):
        code, _, err = fz("finetune", "--init", folder, *pairs, *more, "--out", tmp_path / "no")
        assert code == 2 and message in err


@slow
def test_classes_and_rewards_are_learnt_resumed_and_exported(tmp_path, fz):
    folder = chat_folder(tmp_path / "phi", hf.PhiConfig(**BYTES))
    texts = ({"text": f"{i} is it", "label": "odd" if i % 2 else "even"} for i in range(24))
    chats.write_lines(tmp_path / "classify.jsonl", texts)
    chats.pair_file(tmp_path / "reward.jsonl", 12)
    for objective, more in (("classify", ["--lora", "rank=4"]), ("reward", [])):
        run, out, on = (tmp_path / f"{objective}{end}" for end in ("", "-out", "-on"))
        start = ["finetune", "--objective", objective, "--data", tmp_path / f"{objective}.jsonl", *chats.FLAGS, *more]
        code, said, err = fz(*start, "--init", folder, "--steps", 3, "--stop-at", 2, "--out", run)
        assert (code, err) == (0, "") and "PhiForCausalLM has no functions of fzero's own" in said
        assert fz("finetune", "--resume", "--out", run)[::2] == (0, "")
        assert fz("export", run, "--out", out)[::2] == (0, "")
        module = hf.AutoModelForSequenceClassification.from_pretrained(out).eval()
        trained, ids = weights.load(run, wide=True), torch.arange(20, 60)[None].clone()
        ids[:, 30:] = module.config.pad_token_id
        with torch.no_grad():
            found = models.logits(trained.model, trained.params, {"tokens": ids[:, :30]})[:, -1]
            assert_close(found, module(ids).logits, rtol=1e-4, atol=1e-5)
        assert fz(*start, "--init", out, "--steps", 1, "--lr", 0, "--out", on)[::2] == (0, "")
        before, after = (pytree.named_leaves(weights.load(one).params) for one in (run, on))
        assert torch.equal(before["head/score"], after["head/score"])
        code, _, err = fz("finetune", "--data", tmp_path / "chat.jsonl", *chats.FLAGS, "--init", out, "--out", tmp_path)
        assert code == 2 and "objective is chat and the model has a head of" in err


@slow
def test_a_decoder_that_mixes_documents_learns_from_rows_of_one(tmp_path, fz):
    config = hf.BloomConfig(vocab_size=260, hidden_size=16, n_layer=2, n_head=4)
    folder, run = chat_folder(tmp_path / "bloom", config), tmp_path / "run"
    start = ["finetune", "--init", folder, "--data", tmp_path / "chat.jsonl", *chats.FLAGS, "--steps", 2]
    code, _, err = fz(*start, "--out", run)
    assert code == 2 and "mixes the documents of a row" in err
    apart = ["--set", "data.packing=buckets", "--set", "data.within_documents=false"]
    assert fz(*start, *apart, "--out", tmp_path / "apart")[::2] == (0, "")
    assert chats.column(tmp_path / "apart", "loss")[1] < chats.column(tmp_path / "apart", "loss")[0]
