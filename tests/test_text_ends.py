"""Where texts begin and end: the ids of a folder's texts are those of AutoTokenizer, and runs and exports keep what a
folder says of them (fzero/run/setup/vocabulary.py, fzero/data/tokenizer_classes.py)."""

import json
import shutil

import chats
import continued
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from fzero.data import encoder, end_tokens, read_chat, render, special_tokens
from fzero.data.preferences import pair_of, text_ids
from fzero.run import vocabulary, weights
from fzero.run.setup.vocabulary import start_chat, start_pad, start_tokenizer

TEXTS = ("a b", "1+1 é", "", " lead", "x<|im_end|>y", "<s> z </s>")
MESSAGES = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "It is 2."}]
WITH_EOS = "{{ bos_token }}{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"


def with_begin(library, end=False):
    """The tokenizer, which puts <|im_start|> before a text, and <|endoftext|> after it if `end`."""
    ids = {name: library.token_to_id(name) for name in ("<|im_start|>", "<|endoftext|>")}
    single = f"<|im_start|> $A{' <|endoftext|>' if end else ''}"
    library.post_processor = processors.TemplateProcessing(single=single, special_tokens=[*ids.items()])
    return library


def unmarked():
    """A tokenizer whose special tokens are ordinary entries of its vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    named = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    library = Tokenizer(models.BPE({text: i for i, text in enumerate((*alphabet, *named))}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return library


BARE = WITH_EOS.replace("{{ bos_token }}", "")
NAMED = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": int(1e30)}
TOKEN = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
# What is in a folder beside the model: (the tokenizer, tokenizer_config.json, special_tokens_map.json, the template)
CASES = {
    "plain": (chats.tokenizer, {**FAST, **NAMED}, None, chats.TEMPLATE),
    "begins": (lambda: with_begin(chats.tokenizer()), {**FAST, **NAMED}, None, WITH_EOS),
    "begins and ends": (lambda: with_begin(chats.tokenizer(), True), {**FAST, **NAMED}, None, WITH_EOS),
    "flags that a file wins over": (
        lambda: with_begin(chats.tokenizer()), {**FAST, **NAMED, "add_bos_token": False, "add_eos_token": True}, None,
        WITH_EOS),
    "map alone": (lambda: with_begin(chats.tokenizer()), FAST, NAMED, WITH_EOS),
    "map over config": (
        chats.tokenizer, {**FAST, **NAMED, "eos_token": "<|endoftext|>"}, {"eos_token": TOKEN}, WITH_EOS),
    "config over map": (
        chats.tokenizer, {**FAST, **NAMED, "added_tokens_decoder": {}}, {"eos_token": "<|endoftext|>"}, WITH_EOS),
    "no config": (chats.tokenizer, None, NAMED, WITH_EOS),
    "unmarked": (unmarked, {**FAST, **NAMED, "additional_special_tokens": ["<|endoftext|>"]}, None, WITH_EOS),
    "token with flags": (unmarked, {**FAST, **NAMED, "eos_token": {"__type": "AddedToken", **TOKEN}}, None, WITH_EOS),
    "defaults of GPT-2": (chats.tokenizer, {"tokenizer_class": "GPT2TokenizerFast"}, None, WITH_EOS),
    "defaults of Qwen2": (chats.tokenizer, {"tokenizer_class": "Qwen2Tokenizer"}, None, BARE),
    "Llama 3": (lambda: with_begin(chats.tokenizer()), {"tokenizer_class": "LlamaTokenizer", **NAMED}, None, WITH_EOS),
    "null": (chats.tokenizer, {"tokenizer_class": "GPT2Tokenizer", "bos_token": None}, None, BARE),
    "no template": (lambda: with_begin(chats.tokenizer()), {**FAST, **NAMED}, None, None),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return chats.qwen3_folder(tmp_path_factory.mktemp("text-ends") / "qwen3")


def folder_of(place, to, case, model_type=None, generation=None, **ids):
    """A copy of the model with the files of a case beside it."""
    library, about, named, template = CASES[case]
    shutil.copytree(place, to)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (to / name).unlink()
    library().save(str(to / "tokenizer.json"))
    contents = {"tokenizer_config.json": about, "special_tokens_map.json": named, "generation_config.json": generation}
    for name, content in contents.items():
        if content is not None:
            (to / name).write_text(json.dumps(content))
    if template:
        (to / "chat_template.jinja").write_text(template)
    table = json.loads((to / "config.json").read_text()) | ids
    if model_type:
        table = {"model_type": model_type, "eos_token_id": ids.get("eos_token_id")}
    (to / "config.json").write_text(json.dumps(table))
    return to


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3", "llama", "mistral"])
@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_auto_tokenizer(place, case, model_type, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = folder_of(place, tmp_path / "model", case, model_type, eos_token_id=257)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    if case == "Llama 3" and type(theirs).__name__ == "LlamaTokenizer":
        pytest.skip("this version of transformers loses the spaces of Llama 3")
    tokenizer, chat = start_tokenizer(folder), start_chat(folder)
    encode = encoder(tokenizer)
    for text in TEXTS:
        assert encode(text, add_special=True)[0].tolist() == theirs(text)["input_ids"], text
        if text.strip():
            assert text_ids({"text": text}, None, encode, -1).tolist() == theirs(text)["input_ids"]
    known = {name: str(text) for name, text in theirs.special_tokens_map.items() if isinstance(text, str)}
    assert {name: text for name, text in special_tokens(folder).items() if name in known} == known
    assert (chat is None) == (theirs.chat_template is None)
    if chat is not None:
        try:
            expected = theirs.apply_chat_template(MESSAGES, tokenize=True, return_dict=True)["input_ids"]
        except Exception:  # of a class without defaults the template has no eos_token
            with pytest.raises(ValueError, match="_token' is undefined"):
                render(chat, MESSAGES)
            return
        assert encode(render(chat, MESSAGES))[0].tolist() == expected


def run_of(folder, to, fz):
    code, _, err = fz("import", folder, "--out", to)
    assert (code, err) == (0, "")
    return to


GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [256, 257], "pad_token_id": 256}


def test_an_import_and_its_export_keep_every_entry(place, tmp_path, fz):
    about = {"padding_side": "left", "clean_up_tokenization_spaces": False, "extra": {"a": [1, None]}}
    ids = {"bos_token_id": 257, "eos_token_id": [258, 256], "pad_token_id": 256}
    folder = folder_of(place, tmp_path / "model", "begins", generation=GENERATION, **ids)
    own = json.loads((folder / "tokenizer_config.json").read_text()) | about
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "special_tokens_map.json").write_text(json.dumps({**NAMED, "eos_token": TOKEN}))
    run = run_of(folder, tmp_path / "run", fz)
    for i in range(2):
        assert fz("export", run, "--out", tmp_path / f"out-{i}")[::2] == (0, "")
        out = tmp_path / f"out-{i}"
        assert json.loads((out / "tokenizer_config.json").read_text()) == own
        assert (out / "special_tokens_map.json").read_text() == (folder / "special_tokens_map.json").read_text()
        # An answer ends with <|im_end|>, at which generate did not stop.
        found = json.loads((out / "generation_config.json").read_text())
        assert found == {**GENERATION, "eos_token_id": [256, 257, 258]}
        table = json.loads((out / "config.json").read_text())
        assert {name: table[name] for name in ids} == ids
        assert (out / "chat_template.jinja").read_text() == WITH_EOS
        assert (out / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
        run = run_of(out, tmp_path / f"run-{i}", fz)
    assert start_pad(run) == 256


def test_a_prompt_begins_and_an_answer_ends_as_the_folder_says(place, tmp_path, fz):
    folder = folder_of(place, tmp_path / "model", "map alone", eos_token_id=[256, 120])
    run, tokenizer = run_of(folder, tmp_path / "run", fz), start_tokenizer(folder)
    ids, stops = vocabulary.prompt_ids(run, tokenizer, "ab", chat=False)
    assert ids.tolist()[0] == 257 and len(ids) == 3 and stops == [256, 120, 258]
    ids, stops = vocabulary.prompt_ids(run, tokenizer, "ab", chat=True)
    assert ids.tolist()[0] == 257 and ids.tolist()[-1] == 258 and stops == [256, 120, 258]
    encode = encoder(tokenizer)
    pair = pair_of({"prompt": "a", "chosen": "b", "rejected": "c"}, None, encode, 256)
    assert [example.ids.tolist()[0] for example in pair] == [257, 257]
    assert [example.counted.tolist() for example in pair] == [[False, False, True, True]] * 2
    assert text_ids({"text": "ab"}, None, encode, 256).tolist()[0] == 257
    # Of a template that ends an answer with another token than eos_token.
    (folder / "special_tokens_map.json").write_text(json.dumps({**NAMED, "eos_token": "<|endoftext|>"}))
    (folder / "chat_template.jinja").write_text(chats.TEMPLATE)
    assert end_tokens(read_chat(folder), tokenizer) == [256, 258]


def ends_of(kind, ids):
    """(eos_token_id of config.json, generation_config.json) of a folder whose texts end at `ids`."""
    odd = {"_from_model_config": True, "transformers_version": "4.40.0", "a_new_entry": [1]}
    return {
        "config": (ids, None),
        "generation": (None, {"eos_token_id": ids}),
        "parted": (ids[:1], {"eos_token_id": ids[1:], "pad_token_id": 256}),
        "one": (ids[0], {"eos_token_id": ids[-1]}),
        "none": (ids, {"eos_token_id": None, "bos_token_id": None}),
        "empty": (ids, {"eos_token_id": []}),
        "odd": (ids, {**odd, "eos_token_id": ids[0]}),
    }[kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"),
    [("config", "plain"), ("config", "begins"), ("generation", "map alone"), ("parted", "plain"), ("one", "begins"),
     ("none", "plain"), ("empty", "plain"), ("odd", "plain")],
)  # fmt: skip
def test_generate_on_the_export_stops_where_sample_stops(place, case, kind, tmp_path, fz, capsys):
    """The second token that the model says after each of several prompts is an end, in turn."""
    transformers = pytest.importorskip("transformers")
    found = set()
    for i, prompt in enumerate(("a", "1+1")):
        ends = [256]
        for _ in range(2):  # first without the end, to see what the model says
            eos, generation = ends_of(kind, ends)
            folder = folder_of(place, tmp_path / f"{i}-{len(ends)}", case, generation=generation, eos_token_id=eos)
            run = run_of(folder, tmp_path / f"{i}-{len(ends)}-run", fz)
            trained, tokenizer = weights.load(run), start_tokenizer(run)
            ids, stops = vocabulary.prompt_ids(run, tokenizer, prompt, chat=False)
            begin = torch.from_numpy(ids.astype("int64"))[None]
            (ours,) = continued.rows(trained.model, trained.params, begin, 12, eos=stops)
            said = ours[len(ids) :]
            ends = [256, said[min(2, len(said) - 1)]]
        out = tmp_path / f"{i}-out"
        assert fz("export", run, "--out", out)[::2] == (0, "")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
        capsys.readouterr()
        words = transformers.AutoTokenizer.from_pretrained(out)(prompt, return_tensors="pt")
        expected = theirs.generate(**words, max_new_tokens=12, do_sample=False)
        assert ours == expected[0].tolist()
        found.add(len(ours) - len(ids))
    assert min(found) < 12


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["--lora", "rank=2"]])
def test_a_tuned_chat_model_gives_back_what_its_folder_said(place, lora, tmp_path, fz):
    """Of a base, at whose ends no answer ends: its template's token is added."""
    folder = folder_of(place, tmp_path / "model", "begins", generation={**GENERATION, "eos_token_id": 256},
                       bos_token_id=257, eos_token_id=256, pad_token_id=258)  # fmt: skip
    chats.chat_file(tmp_path / "chat.jsonl")
    start = ["finetune", "--init", folder, "--data", tmp_path / "chat.jsonl", *chats.FLAGS, "--steps", 1, *lora]
    assert fz(*start, "--out", tmp_path / "run")[::2] == (0, "")
    assert fz(*start[:1], "--init", tmp_path / "run", *start[3 : -len(lora) or None], "--out", tmp_path / "on")[0] == 0
    for name in ("run", "on"):
        out = tmp_path / f"{name}-out"
        assert fz("export", tmp_path / name, "--out", out)[::2] == (0, "")
        assert json.loads((out / "tokenizer_config.json").read_text()) == CASES["begins"][1]
        assert json.loads((out / "generation_config.json").read_text()) == {**GENERATION, "eos_token_id": [256, 258]}
        table = json.loads((out / "config.json").read_text())
        assert (table["bos_token_id"], table["eos_token_id"], table["pad_token_id"]) == (257, 256, 258)
    if lora:
        assert fz("export", tmp_path / "run", "--out", tmp_path / "adapter", "--adapter")[::2] == (0, "")
        assert (tmp_path / "adapter/generation_config.json").read_text() == (out / "generation_config.json").read_text()
        assert vocabulary.start_ids(tmp_path / "adapter") == {"token_ids": vocabulary.ids_of(folder / "config.json")}


def test_ids_that_are_none_are_refused_by_name(place, tmp_path):
    for entry, said in (({"eos_token_id": "x"}, "eos_token_id is 'x'"), ({"eos_token_id": [1, "x"]}, "is 'x'"),
                        ({"pad_token_id": 10**30}, "pad_token_id is 1000.* does not fit into 64 bits")):  # fmt: skip
        folder = folder_of(place, tmp_path / said[:5] / str(len(said)), "plain", **entry)
        with pytest.raises(ValueError, match=rf"config\.json: .*{said}"):
            vocabulary.start_ids(folder)
