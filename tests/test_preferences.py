"""Direct preference optimization: pairs in rows, the loss by its formula, on meshes, and runs from the command line."""

import json
import re

import chats
import numpy as np
import pytest
import ranks
import torch
import torch.nn.functional as F
from close import assert_close
from law_cases import F64, FP64, T, V, config_of

import fzero
from fzero import models, optim
from fzero.core import pytree
from fzero.data import Chat, Lengths, RowStream, encoder, open_tokens, prepare_preferences, read_reference
from fzero.data.preferences import pair_of
from fzero.models import Ctx, answer_log_probs
from fzero.models.preference import log_probs_of
from fzero.run import run_folder, weights
from fzero.sharding import Context, gather_on_first

EOS = {"eos_token": "<|im_end|>"}
FLAGS = ["--objective", "dpo", *chats.FLAGS, "--set", "train.eval_every=6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chats.tuning_folder(tmp_path_factory.mktemp("pairs"))


# ---- lines -----------------------------------------------------------------------------------------------------------


def shown(example, tokenizer):
    """(text, the part of it that counts)."""
    return tokenizer.decode(example.ids.tolist()), tokenizer.decode(example.ids[example.counted].tolist())


def test_texts_and_messages_with_and_without_a_prompt_are_the_same_pairs():
    tokenizer, chat = chats.our_tokenizer(), Chat(chats.TEMPLATE, EOS)
    encode = encoder(tokenizer)
    row = next(chats.pairs(1))
    chosen, rejected = pair_of(row, chat, encode, 256)
    begin = "<|im_start|>user\n0+0<|im_end|>\n<|im_start|>assistant\n"
    assert shown(chosen, tokenizer) == (f"{begin}It is 0.<|im_end|>", "It is 0.<|im_end|>")
    assert shown(rejected, tokenizer)[1] == "It is 3, I am quite sure of it.<|im_end|>"
    whole = {name: row["prompt"] + row[name] for name in ("chosen", "rejected")}
    texts = {"prompt": "1+1 is ", "chosen": "2", "rejected": "three"}
    plain = pair_of(texts, None, encode, 256)
    assert [shown(example, tokenizer) for example in plain] == [("1+1 is 2", "2"), ("1+1 is three", "three")]
    assert all(example.ids[-1] == 256 and example.counted[-1] for example in plain)
    for given, expected in ((whole, (chosen, rejected)), ({"chosen": "1+1 is 2", "rejected": "1+1 is three"}, plain)):
        for a, b in zip(pair_of(given, chat, encode, 256), expected):
            assert np.array_equal(a.ids, b.ids) and np.array_equal(a.counted, b.counted)


@pytest.fixture(scope="module")
def corpus(folder):
    chat = Chat(chats.TEMPLATE, EOS)
    prepare_preferences(folder / "pairs.jsonl", folder / "corpus", chat, chats.our_tokenizer(), Lengths(200, 96))
    return folder / "corpus"


def test_both_answers_of_a_pair_stand_in_one_row(corpus):
    stream = RowStream(open_tokens(corpus), 200, 2)
    documents = [i for row in stream.rows for i in row]
    assert sorted(documents) == list(range(len(stream.tokens.docs) - 1))
    assert all(row[0::2] == [i - 1 for i in row[1::2]] and all(i % 2 == 0 for i in row[0::2]) for row in stream.rows)
    assert any(len(row) > 2 for row in stream.rows)


# ---- the loss --------------------------------------------------------------------------------------------------------


def batch_of(seed, rows=8):
    """Rows of six tokens: a pair in each, or two pairs whose second lacks an answer's tokens."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (rows, T + 1), generator=g)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 2, 3, 4]]).repeat(rows // 2, 1).int()
    mask = torch.rand(rows, T, generator=g) < 0.8
    mask[:, 0] = mask[:, 4] = True
    mask[1::2, 2] = True
    reference = torch.where(torch.tensor([[1, 0, 0, 1, 0, 1], [1, 1, 0, 1, 1, 1]]).repeat(rows // 2, 1) > 0, 1.0, 0.0)
    reference = reference * torch.randn(rows, T, generator=g, dtype=F64)
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "documents": documents, "mask": mask}
    return batch | {"reference": reference}


def written_out(model, params, batch, beta, smoothing):
    """(losses, margins, chosen, rejected) of the pairs, one answer at a time."""
    logits = models.logits(model, params, batch, Ctx(dtype=F64)).log_softmax(-1)
    nats = logits.gather(-1, batch["targets"][..., None])[..., 0]
    found = []
    for row in range(len(nats)):
        gains, counted = {}, {}
        for d in batch["documents"][row].unique().tolist():
            own = batch["documents"][row] == d
            gains[d] = nats[row][own & batch["mask"][row]].sum() - batch["reference"][row][own].sum()
            counted[d] = bool((own & batch["mask"][row]).any())
        for d in (0, 2):
            if counted.get(d) and counted.get(d + 1):
                chosen, rejected = beta * gains[d], beta * gains[d + 1]
                z = chosen - rejected
                loss = -(1 - smoothing) * torch.log(F.sigmoid(z)) - smoothing * torch.log(F.sigmoid(-z))
                found.append(torch.stack((loss, z, chosen, rejected)))
    return torch.stack(found).T


@pytest.mark.parametrize("kind", ["llama", "gemma", *(pytest.param(k, marks=pytest.mark.slow) for k in (
    "gpt2", "mlp", "moe dropless", "deepseek"))])  # fmt: skip
def test_the_loss_and_its_gradient_are_those_of_the_formula(kind):
    model = models.build(config_of(kind, **({} if kind == "mlp" else {"dropout": 0.0})))
    params, batch = models.init_params(model, fzero.random.key(1), F64), batch_of(0)
    for beta, smoothing in ((0.1, 0.0), (0.7, 0.2)):
        of_pairs = models.dpo(model, beta, smoothing)
        got = models.loss(of_pairs, params, batch, Ctx(dtype=F64))
        losses, margins, chosen, rejected = written_out(model, params, batch, beta, smoothing)
        assert int(got.num_tokens) == len(losses) > 8
        expected = {"accuracy": (margins > 0).sum(), "margin": margins.sum(), "reward_chosen": chosen.sum()}
        expected |= {"reward_rejected": rejected.sum(), "loss": losses.sum()}
        assert_close(got.extra | {"loss": got.total}, expected, rtol=1e-10)
        grads = torch.func.grad(lambda p, m=of_pairs: models.loss(m, p, batch, Ctx(dtype=F64)).total)(params)
        by_hand = torch.func.grad(lambda p, b=beta, s=smoothing: written_out(model, p, batch, b, s)[0].sum())(params)
        assert_close(grads, by_hand, rtol=1e-9, atol=1e-12)


def test_a_model_that_is_its_own_reference_has_the_loss_ln_2():
    model = models.build(config_of("llama", dropout=0.0))
    params, batch = models.init_params(model, fzero.random.key(1), F64), batch_of(0)
    batch["reference"] = log_probs_of(batch, answer_log_probs(model, params, batch, Ctx(dtype=F64)))
    got = models.loss(models.dpo(model), params, batch, Ctx(dtype=F64))
    assert_close(got.total / got.num_tokens, torch.tensor(2.0, dtype=F64).log(), rtol=1e-12)
    assert float(got.extra["margin"].abs()) < 1e-12


OPTIMIZERS = {"sgd": optim.sgd(0.3), "adam": optim.adamw(1e-2)}


def steps(mesh, kind, optimizer, stage, micro_batches, sequence=False, lora=False):
    """(parameters, log) of three steps."""
    model = models.build(config_of(kind, dropout=0.0, vocab_size=V + 1))
    model = models.lora(model, 2, targets="/w_") if lora else model
    frozen = r"^(?!.*_lora_)" if lora else None
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64, frozen=frozen, sequence=sequence)
    tx = OPTIMIZERS[optimizer]
    state = fzero.init_state(model, tx, plan, seed=0)
    step = fzero.make_train_step(models.dpo(model, 0.7), tx, plan, micro_batches=micro_batches)
    log = []
    for i in range(3):
        state, metrics = step(state, fzero.local_batch(batch_of(i), mesh, micro_batches=micro_batches))
        log.append({"loss": metrics.loss, "norm": metrics.grad_norm, **metrics.extra})
    return gather_on_first(state.params, plan.params, mesh), log


MESHES = [
    ("llama", "adam", {"dp": 2}, 3, 2),
    ("gemma", "sgd", {"tp": 2}, 0, 1),
    *(pytest.param(case, marks=pytest.mark.slow) for case in (
        ("llama", "sgd", {"dp": 2}, 3, 1), ("gpt2", "sgd", {"tp": 2}, 2, 2),
        ("llama", "adam", {"dp": 2, "tp": 2}, 3, 2))),
    ("llama", "adam", {"cp": 2}, 3, 2, Context("gather", "contiguous")),
    *(pytest.param(case, marks=pytest.mark.exhaustive) for case in (
        ("gemma", "sgd", {"cp": 2}, 0, 1, Context("ring")),
        ("gpt2", "sgd", {"dp": 2, "cp": 2}, 3, 2, Context("ulysses")),
        ("llama", "sgd", {"pp": 2, "cp": 2}, 3, 2, Context("hierarchical")),
        ("llama", "sgd", {"cp": 3}, 1, 1, Context("gather", "zigzag")),
        ("deepseek", "adam", {"cp": 2, "tp": 2}, 1, 1, Context("gather", "balanced")))),
]  # fmt: skip


@pytest.mark.parametrize("case", MESHES)
def test_a_mesh_trains_as_one_process(case):
    kind, optimizer, sizes, *how = case
    expected, log = steps(fzero.one_process(), kind, optimizer, 0, 1)
    got = ranks.run(int(np.prod(list(sizes.values()))), steps, kind, optimizer, *how, mesh=sizes)
    assert_close(got[0][1], log, rtol=1e-10, atol=1e-12)
    assert_close(got[0][0], expected, rtol=1e-10, atol=1e-11)


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_lora_prefers_what_is_chosen_and_the_reference_stays(folder, tmp_path, fz):
    run, again = tmp_path / "run", tmp_path / "again"
    start = ["finetune", "--init", folder / "qwen3", "--lora", "rank=8", *FLAGS, "--steps", 12]
    code, out, err = fz(*start, "--data", folder / "pairs.jsonl", "--out", run, "--prompt", "1+1")
    assert (code, err) == (0, "") and "reads the pairs, once" in out and "nats per pair" in out
    config = run_folder.read_config(run)
    assert config.preset == "finetune-dpo-lora" and len(config.dpo.reference) == 16
    margins = chats.column(run, "margin")
    assert abs(chats.column(run, "loss")[0] - np.log(2)) < 1e-4 and abs(margins[0]) < 1e-3
    assert margins[-1] > 0.2 and chats.column(run, "accuracy")[-1] > 0.9
    assert chats.column(run, "val_margin")[-1] > 0.2 and chats.column(run, "val_accuracy")[-1] > 0.9

    assert fz("report", run)[0] == 0
    said = (run / "report" / "report.md").read_text()
    assert "a validation loss of" in said and "nats per pair" in said
    assert "perplexity" not in said and "nats per token" not in said

    # The reference is the model without factors, which have not moved it.
    base = models.build(chats.QWEN3)
    stream = RowStream(open_tokens(run / "data"), 96, 2)
    batch = stream.assemble_rows(np.arange(len(stream.rows)))
    sums = answer_log_probs(base, weights.load_start(folder / "qwen3").params, batch)
    known = read_reference(run / "data", "train", config.dpo.reference)
    assert_close(torch.from_numpy(known[stream.rows[3]]), sums[3, : len(stream.rows[3])], rtol=1e-4)

    # Stopped and resumed: the same bits. Another run on the same corpus asks the reference for nothing.
    code, out, _ = fz(*start, "--data", run / "data", "--out", again, "--stop-at", 5, "--seed", 1)
    assert code == 0 and "has read these pairs before" in out
    resumed = tmp_path / "resumed"
    assert fz(*start, "--data", folder / "pairs.jsonl", "--out", resumed, "--stop-at", 5)[0] == 0
    assert fz("finetune", "--resume", "--out", resumed)[0] == 0
    assert chats.column(resumed, "loss") == chats.column(run, "loss")
    after = pytree.named_leaves(weights.load(run).params)
    assert all(torch.equal(leaf, after[n]) for n, leaf in pytree.named_leaves(weights.load(resumed).params).items())


@pytest.mark.slow
def test_another_model_is_another_reference(folder, tmp_path, fz):
    run = tmp_path / "run"
    start = ["finetune", *FLAGS, "--steps", 4]
    assert fz(*start, "--init", folder / "qwen3", "--data", folder / "pairs.jsonl", "--out", run)[0] == 0
    config = run_folder.read_config(run)
    assert config.preset == "finetune-dpo"
    code, out, _ = fz("finetune", "--init", run, *FLAGS, "--data", run / "data", "--steps", 1, "--out", tmp_path / "c")
    assert code == 0 and "reads the pairs, once" in out
    assert run_folder.read_config(tmp_path / "c").dpo.reference != config.dpo.reference
    more = ["--set", f"dpo.reference={config.dpo.reference}", "--steps", 1]
    code, out, _ = fz("finetune", "--init", run, *FLAGS, "--data", run / "data", *more, "--out", tmp_path / "d")
    assert code == 0 and "is another model than the one" in out
    assert chats.column(tmp_path / "d", "margin")[0] > 0.05


def bad(row, **changes):
    return json.dumps({**row, **changes})


PAIR = next(chats.pairs(1))
LONG = [{"role": "assistant", "content": "x" * 40}]
BAD_LINES = {
    "{": r"pairs.jsonl:3: .*JSON",
    bad({}, prompt="1", chosen="2"): "pairs.jsonl:3: the line has no 'rejected'; it has prompt, chosen",
    bad(PAIR, rejected=PAIR["chosen"]): "pairs.jsonl:3: chosen and rejected are equal, so neither is preferred",
    bad(PAIR, rejected="2"): "pairs.jsonl:3: prompt, chosen and rejected must be three texts or three lists",
    bad(PAIR, rejected=[]): "pairs.jsonl:3: rejected is .*; it must be a list of messages",
    bad(PAIR, chosen=[{"content": "x"}]): "pairs.jsonl:3: message 1 of chosen is ",
    bad({}, chosen=PAIR["chosen"], rejected=LONG): "pairs.jsonl:3: .*no 'prompt', and chosen and rejected do not begin",
    bad(PAIR, chosen=LONG): "pairs.jsonl:3: the two answers, each with the prompt, take 1.. positions of a row",
}  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named_with_its_number(folder, tmp_path, fz, line):
    path = chats.pair_file(tmp_path / "pairs.jsonl", 2)
    path.write_text(path.read_text() + line + "\n")
    code, _, err = fz("finetune", "--init", folder / "qwen3", "--data", path, *FLAGS, "--out", tmp_path / "run")
    assert code == 2 and err.count("\n") == 1
    assert re.search(BAD_LINES[line], err), err
    assert not (tmp_path / "run").exists()


def test_what_does_not_go_together_is_one_line(folder, tmp_path, fz):
    args = ["finetune", "--init", folder / "qwen3", "--data", folder / "pairs.jsonl", "--out", tmp_path / "run"]
    for more, message in (
        (["--objective", "dop"], "objective is 'dop' (did you mean dpo?)"),
        (["--set", "dpo.beta=1"], "dpo.beta does nothing with objective=chat"),
        ([*FLAGS, "--set", "dpo.beta=0"], "dpo.beta is 0.0; it must be above 0"),
        ([*FLAGS, "--set", "dpo.smoothing=0.5"], "dpo.smoothing is 0.5; it must be at least 0 and below 0.5"),
        ([*FLAGS, "--set", "dpo.reference=0123"], "reference-0123: no such folder"),
    ):
        code, _, err = fz(*args, *more)
        assert code == 2 and message in err and err.count("\n") == 1, err
    chats.qwen3_folder(tmp_path / "bare", template="")
    args[2] = tmp_path / "bare"
    code, _, err = fz(*args, *FLAGS)
    assert code == 2 and "pairs.jsonl:1: the line has messages and the model no chat template" in err, err
    model = models.build(config_of("mlp"))._replace(features=None)
    with pytest.raises(ValueError, match="dpo: the model has a loss of its own, as a module"):
        models.dpo(model)
    with pytest.raises(ValueError, match="dpo: the batch has no 'reference'; it has documents, mask, targets, tokens"):
        params, batch = models.init_params(models.build(config_of("mlp")), fzero.random.key(0)), batch_of(0)
        del batch["reference"]
        models.loss(models.dpo(models.build(config_of("mlp"))), params, batch, Ctx())
