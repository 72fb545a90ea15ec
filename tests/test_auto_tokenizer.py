"""The ids of a folder's texts are those of AutoTokenizer, whatever class builds its tokenizer and whichever files name
its tokens (fzero/data/auto_tokenizer.py, tokenizer_classes.py)."""

import json

import pytest
from tokenizer_folders import BYTES, TEXTS, content_of, draw_folder, flags, write_folder

from fzero.core import write_texts
from fzero.data import (
    Chat,
    auto_tokenizer,
    chat_files,
    encoder,
    json_tokenizer,
    read_chat,
    render,
    special_tokens,
    tokenizer_classes,
)
from fzero.data.prepare import tokenizer_of_file
from fzero.models import LlamaConfig
from fzero.run import recipe, run_folder, weights
from fzero.run.setup import vocabulary
from fzero.run.setup.vocabulary import start_tokenizer

WHY = "transformers is not installed; it is the reference these tests compare with"
QWEN = {"tokenizer_class": "Qwen2Tokenizer"}
PAD = {"pad_token": "[PAD]", "additional_special_tokens": ["<new>"]}
# A folder of each kind: (one of LIBRARIES, model_type, then as in write_folder).
FAMILIES = {
    "Qwen2": ("bytes by NFC", "qwen2", QWEN),
    "Qwen2 that names another class": ("bytes", "qwen2", {"tokenizer_class": "LlamaTokenizerFast"}),
    "Qwen3 with vocab.json": ("bytes", "qwen3", {**QWEN, "add_bos_token": True, "bos_token": "<|im_start|>"}),
    "Qwen3.5": ("bytes", "qwen3_5_text", {"tokenizer_class": "Qwen3_5Tokenizer"}),
    "GPT-2": ("bytes with a post-processor", "gpt2", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
    "GPT-2 with vocab.json": ("bytes", "gpt2", None),
    "Phi": ("bytes", "phi", {"tokenizer_class": "CodeGenTokenizer"}),
    "GPT-NeoX": ("bytes between", "gpt_neox", {"tokenizer_class": "GPTNeoXTokenizer"}),
    "Cohere": ("bytes between", "cohere", {"tokenizer_class": "CohereTokenizerFast"}),
    "Llama 2": ("pieces after <s>", "llama", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
    "Llama 2, legacy": ("pieces after <s>", "llama", {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}),
    "Llama 2 without a first space": (
        "pieces", "llama", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
    "Code Llama": ("pieces", "llama", {"tokenizer_class": "CodeLlamaTokenizer"}),
    "Gemma": ("pieces after <bos>", "gemma2", {"tokenizer_class": "GemmaTokenizer"}),
    "Mistral, a Llama's tokenizer": ("pieces after <s>", "mistral", {"tokenizer_class": "LlamaTokenizer"}),
    "a file alone": ("bytes between", "olmo2", None),
    "tokens that the vocabulary lacks": ("bytes", "llama", {"tokenizer_class": "PreTrainedTokenizerFast", **PAD}),
    "tokens of added_tokens.json": ("bytes", "smollm3", None, None, {"<tool>": 900, "lazy": 901}),
    "a map with lists": ("bytes", "gemma2", QWEN, {"eos_token": flags("<e>"), "additional_special_tokens": ["<x>"]}),
}  # fmt: skip
CORE = ("Qwen2 that names another class", "GPT-2 with vocab.json", "Llama 2", "tokens that the vocabulary lacks")


def skip_older():
    """Skip on releases before 5.20, which lose the spaces of Llama 3 and take other classes of some models."""
    transformers = pytest.importorskip("transformers", reason=WHY)
    if not hasattr(transformers.PreTrainedTokenizerFast, "_tokenizer_json_has_byte_level"):
        pytest.skip(f"transformers {transformers.__version__} loses the spaces of Llama 3")


def differences(folder, texts=TEXTS):
    """The texts of which fzero and AutoTokenizer have other ids."""
    theirs = auto_tokenizer.load_auto_tokenizer(folder)
    ours = encoder(start_tokenizer(folder))
    rows = [
        (text, whole, ours(text, add_special=whole)[0].tolist(), theirs(text, add_special_tokens=whole)["input_ids"])
        for text in texts
        for whole in (True, False)
    ]
    return [row for row in rows if row[2] != row[3]]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in CORE else pytest.mark.slow) for case in FAMILIES]
)
def test_ids_are_those_of_auto_tokenizer(case, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason=WHY)
    folder = write_folder(tmp_path / "model", *FAMILIES[case], merges="vocab.json" in case)
    with monkeypatch.context() as patch:  # the classes alone: nothing is compared when a folder is opened
        patch.setattr(auto_tokenizer, "expect_same_ids", lambda *_: None)
        assert differences(folder) == []
    own = start_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert own.vocab_size == len(theirs)
    known = {name: text for name, text in theirs.special_tokens_map.items() if isinstance(text, str)}
    assert special_tokens(folder) == known
    ids = theirs("It's the <|im_end|> fox")["input_ids"]
    assert own.decode([i for i in ids if i != own.eos]) == theirs.decode([i for i in ids if i != own.eos])


def test_padding_and_truncation_of_a_file_are_left_out(tmp_path):
    transformers = pytest.importorskip("transformers", reason=WHY)
    folder = write_folder(tmp_path / "model", *FAMILIES[CORE[0]])
    library = transformers.AutoTokenizer.from_pretrained(folder).backend_tokenizer
    library.enable_truncation(4)
    library.enable_padding(length=9, pad_id=0, pad_token="!")
    library.save(str(folder / "tokenizer.json"))
    assert '"max_length": 4' in (folder / "tokenizer.json").read_text()
    assert differences(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(("compared", "many"), [(True, 100), (False, 300)])
def test_drawn_folders_have_the_ids_of_auto_tokenizer(compared, many, tmp_path, monkeypatch):
    """Without the comparison at the door, the classes that fzero knows are alike; with it, none differs in silence."""
    skip_older()
    if not compared:
        monkeypatch.setattr(auto_tokenizer, "expect_same_ids", lambda *_: None)
    same, refused, wrong = 0, list[str](), []
    for seed in range(many):
        folder = tmp_path / str(seed)
        drawn = draw_folder(folder, seed)
        if not compared and "BertTokenizer" in str(drawn):
            continue
        try:
            start_tokenizer(folder)
        except ValueError as error:
            refused.append(str(error))
            continue
        if auto_tokenizer.load_auto_tokenizer(folder) is not None:
            same += 1
            wrong += [(drawn, difference) for difference in differences(folder)]
    assert not wrong, wrong[:3]
    assert same > many / 2
    known = ("which token ends", "unk_token of its class", "there is none; write one", "is not in its vocabulary")
    known += ("(BertTokenizer)", "install transformers", "not a Hugging Face tokenizer.json")
    assert [error for error in refused if not any(part in error for part in known)] == []


@pytest.mark.slow
def test_the_class_of_a_model_type_is_that_of_transformers():
    skip_older()
    from transformers.models.auto import tokenization_auto
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    theirs = {one: tokenization_auto.TOKENIZER_MAPPING_NAMES.get(one) for one in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    theirs = {one: name for one, name in theirs.items() if name is not None}
    assert {one: tokenizer_classes.CLASS_OF.get(one) for one in theirs} == theirs
    wrong = {
        one
        for one in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if theirs.get(one) != "TokenizersBackend"
    }
    assert wrong & set(theirs) <= set(tokenizer_classes.ALWAYS)


def test_what_has_another_meaning_is_refused_by_name(tmp_path, monkeypatch):
    split = write_folder(tmp_path / "split", "bytes", "llama", {"split_special_tokens": True})
    with pytest.raises(ValueError, match="split_special_tokens is True; fzero supports False alone"):
        start_tokenizer(split)
    pieces = write_folder(tmp_path / "pieces", "bytes", "llama", {"tokenizer_class": "LlamaTokenizer"})
    (pieces / "tokenizer.json").rename(pieces / "tokenizer.model")
    with pytest.raises(ValueError, match=r"tokenizer\.model: fzero reads a tokenizer\.json, and there is none"):
        start_tokenizer(pieces)
    bert = write_folder(tmp_path / "bert", "bytes", "llama", {"tokenizer_class": "BertTokenizer"})
    monkeypatch.setattr(auto_tokenizer.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"the class of its tokenizer is BertTokenizer, .* install transformers"):
        start_tokenizer(bert)


def test_ids_that_differ_are_refused_with_the_text(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason=WHY)
    folder = write_folder(tmp_path / "model", "pieces after <s>", "llama", {"tokenizer_class": "LlamaTokenizer"})
    monkeypatch.setattr(auto_tokenizer, "CLASSES", {})  # as a release whose classes build otherwise
    with pytest.raises(
        ValueError, match=r"AutoTokenizer of transformers \(LlamaTokenizer\) has the ids .* of "
    ) as error:
        start_tokenizer(folder)
    assert "set tokenizer_class to 'TokenizersBackend'" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"cannot be read as a tokenizer\.json .*has the ids"):
        tokenizer_of_file(str(folder), None)


def test_a_corpus_has_the_ids_of_the_folder_that_made_it(tmp_path):
    folder = write_folder(tmp_path / "model", "bytes", "qwen2", QWEN)
    made = tokenizer_of_file(str(folder / "tokenizer.json"), None)
    assert made.json == start_tokenizer(folder).json != content_of("bytes")
    assert json_tokenizer(made.json, "again", BYTES[0]).encode("x 12").tolist() == made.encode("x 12").tolist()


def test_an_export_says_where_another_tokenizer_would_be_built(tmp_path):
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert auto_tokenizer.changed_on_load(write_folder(tmp_path / "llama", "bytes", "llama", fast)) == ""
    qwen2 = write_folder(tmp_path / "qwen2", "bytes", "qwen2", fast)
    assert auto_tokenizer.changed_on_load(qwen2) == "Qwen2Tokenizer"
    (line,) = weights.tokenizer_warnings(qwen2)
    assert "AutoTokenizer builds a Qwen2Tokenizer in place of its tokenizer.json" in line
    (qwen2 / "tokenizer.json").write_text(start_tokenizer(qwen2).json)
    assert weights.tokenizer_warnings(qwen2) == []


def test_a_tokenizer_of_a_run_of_its_own_is_exported_as_it_is(tmp_path):
    """With a chat template, too: GPT2Tokenizer, the class of the model_type, would build another one."""
    tokenizer, chat = (
        json_tokenizer(content_of("pieces"), "bpe", "</s>"),
        Chat("{{ eos_token }}", {"eos_token": "</s>"}),
    )
    value = recipe("", LlamaConfig(vocab_size=420))
    run_folder.create_run(tmp_path / "run", value, tokenizer, chat)
    _, files = vocabulary.export_entries(tmp_path / "run", tokenizer)
    about = json.loads(files["tokenizer_config.json"])
    assert about == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    out = write_folder(tmp_path / "out", "pieces", "gpt2", about)
    assert auto_tokenizer.changed_on_load(out) == ""


def test_templates_by_name_are_read_and_go_along(tmp_path):
    """`tool_use` is the template of a conversation with tools, as in transformers."""
    messages, tools = [{"role": "user", "content": "a"}], [{"type": "function"}]
    about = {"chat_template": [{"name": name, "template": f"{name}:{{{{ messages[0].content }}}}"}
                               for name in ("default", "tool_use", "rag")]}  # fmt: skip
    listed = write_folder(tmp_path / "listed", "bytes", "llama", about)
    by_name = {one["name"]: one["template"] for one in about["chat_template"]}
    table = write_folder(tmp_path / "table", "bytes", "llama", {"chat_template": by_name})
    files = write_folder(tmp_path / "files", "bytes", "llama", {"chat_template": "ignored"})
    write_texts(files, {"chat_template.jinja": "default:a", "additional_chat_templates/tool_use.jinja": "tool_use:a",
                        "additional_chat_templates/rag.jinja": "rag:a"})  # fmt: skip
    for folder in (listed, table, files):
        chat = read_chat(folder)
        assert (render(chat, messages), render(chat, messages, tools=tools)) == ("default:a", "tool_use:a")
        out = tmp_path / f"{folder.name}-out"
        out.mkdir()
        write_texts(
            out,
            vocabulary.start_files(folder)
            | chat_files(chat, json.loads((folder / "tokenizer_config.json").read_text())),
        )
        assert read_chat(out) == chat
        assert vocabulary.files_in(out).keys() == vocabulary.files_in(folder).keys()
        assert not any("/" in name for name in vocabulary.start_files(folder, templates=False))
    (files / "chat_template.jinja").unlink()
    assert read_chat(files) is None  # transformers has no default then either
    bare = tmp_path / "bare"
    bare.mkdir()
    write_texts(bare, chat_files(Chat("a", {}, "b"), {}))
    assert read_chat(bare) == Chat("a", {}, "b")


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        (10**6, r"is 1000000, by eos_token_id of .*config\.json; it must be a token, or an id below \d+$"),
        ([10**6, 1], r"is 1000000, by eos_token_id of .*config\.json; "),
        (None, r"which token ends a document\? .* by eos_token_id of .*config\.json$"),
    ],
)
def test_an_end_of_documents_that_is_no_token_is_named_by_its_entry(recorded, message, tmp_path, monkeypatch):
    monkeypatch.setattr(auto_tokenizer, "expect_same_ids", lambda *_: None)
    folder = write_folder(tmp_path / "model", "pieces after <s>", "llama", eos_token_id=recorded)
    if recorded is None:
        text = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(text.replace('"</s>"', '"<end>"').replace('"<|endoftext|>"', '"<o>"'))
    with pytest.raises(ValueError, match=message) as raised:
        start_tokenizer(folder)
    assert "--eos" not in str(raised.value)  # which these commands do not have
