"""`fzero generate`: what is in the file of the completions, how a second call goes on with it, and what is refused."""

import json
import os
import re
import signal
import threading

import chats
import launched
import numpy as np
import pytest
import torch

from fzero import models
from fzero.checkpoint import convert
from fzero.core import pytree
from fzero.run.runner.completion_file import open_completions

PROMPTS = [
    {"prompt": "1+1"},
    {"messages": [{"role": "user", "content": "2+2é"}], "id": "two", "n": 3, "temperature": 1.0, "seed": 5},
    {"ids": [50, 60, 70], "max_tokens": 3, "stop_ids": [77]},
    {"prompt": "a long one " * 4, "temperature": 0.7, "top_p": 0.9, "alternatives": 2},
]
# Steps of one row and prompts in one chunk: the same shapes, and so bits, whatever is left to do.
ALONE = ("--rows", 1, "--step-tokens", 96, "--max-tokens", 8, "--temperature", 0, "--log-probs")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model of transformers, and prompts."""
    path = tmp_path_factory.mktemp("generate")
    chats.qwen3_folder(path / "model")
    chats.write_lines(path / "prompts.jsonl", PROMPTS)
    return path


@pytest.fixture
def generate(place, tmp_path, fz):
    """A function that runs the command: its lines by (number, sample)."""

    def run(*args, source=place / "model", prompts=place / "prompts.jsonl", out=tmp_path / "out.jsonl", flags=ALONE):
        code, said, err = fz("generate", source, "--prompts", prompts, "--out", out, *flags, *args)
        assert (code, err) == (0, ""), err
        assert said.startswith(f"{out}: ") and " completions; " in said
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        found = {(line["number"], line["sample"]): line for line in lines}
        assert len(found) == len(lines)
        return found

    return run


def refused(fz, message, *args):
    code, out, err = fz("generate", *args)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1, err


def test_a_line_has_what_the_model_says(place, generate):
    lines = generate()
    assert set(lines) == {(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (3, 0)}
    source = convert.open_source(place / "model")
    model, params = models.build(source.config), convert.load(source)
    encode = chats.tokenizer().encode
    texts = ["1+1", "<|im_start|>user\n2+2é<|im_end|>\n<|im_start|>assistant\n", None, "a long one " * 4]
    for (number, _), line in lines.items():
        prompt = [50, 60, 70] if number == 2 else encode(texts[number]).ids
        tokens = torch.tensor([[*prompt, *line["ids"]]])
        expected = models.logits(model, params, {"tokens": tokens}).float().log_softmax(-1)[0]
        expected = expected[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
        actual = torch.tensor(line["prompt_log_probs"] + line["log_probs"])
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
        assert [float(str(np.float32(x))) for x in line["log_probs"]] == line["log_probs"]
        if number in (0, 2):
            best = models.logits(model, params, {"tokens": tokens})[0, len(prompt) - 1 : -1].argmax(-1)
            assert line["ids"] == best.tolist() and set(line["drawn_log_probs"]) == {0.0}
        assert line["id"] == ("two" if number == 1 else number)
        assert line["text"] == chats.tokenizer().decode([i for i in line["ids"] if i != 256], skip_special_tokens=False)
        assert len(line["ids"]) == (3 if number == 2 else 8) or line["finish"] == "stop id"
    assert lines[1, 0]["ids"] != lines[1, 1]["ids"] != lines[1, 2]["ids"]
    assert [len(pairs) for pairs in lines[3, 0]["alternatives"]] == [2] * len(lines[3, 0]["ids"])
    assert 0 < min(lines[3, 0]["mass"]) < 1


def test_a_run_says_what_its_folder_says_and_without_log_probs_less(place, generate, fz, tmp_path):
    expected = generate()
    assert fz("import", place / "model", "--out", tmp_path / "run")[0] == 0
    assert generate(source=tmp_path / "run", out=tmp_path / "again.jsonl") == expected
    few = generate(out=tmp_path / "few.jsonl", flags=ALONE[:-1])
    assert set(few[0, 0]) == {"id", "number", "sample", "text", "ids", "finish", "request", "source"}
    assert all(few[key].items() <= expected[key].items() for key in few)


def test_a_draft_changes_no_text_and_must_have_the_same_tokenizer(place, generate, fz, tmp_path):
    expected = generate(flags=ALONE[2:-1])
    base = (place / "model", "--prompts", place / "prompts.jsonl", "--out", tmp_path / "other.jsonl")
    code, said, _ = fz("generate", *base, *ALONE[2:-1], "--draft", chats.qwen3_folder(tmp_path / "draft"))
    lines = [json.loads(line) for line in base[-1].read_text().splitlines()]
    assert code == 0 and {(line["number"], line["sample"]): line for line in lines} == expected
    verified, right = (int(word) for word in re.search(r"; (\d+) of (\d+) guesses were right", said).groups()[::-1])
    assert right == verified > 9  # it has the same weights
    refused(fz, "--guesses is 0 and --draft is there", *base, "--draft", place / "model", "--guesses", 0)
    draft = chats.qwen3_folder(tmp_path / "foreign")
    path = draft / "tokenizer.json"
    path.write_text(path.read_text().replace('"<|im_end|>"', '"<|stop|>"'))
    refused(fz, f"--draft {draft}: has another tokenizer", *base, "--draft", draft)


def test_weights_in_codes_are_those_rounded_in_blocks(place, generate, fz, tmp_path):
    """int8: of each block of 64 numbers of a row of w [in, out], multiples of the largest over 127."""
    lines = generate("--quantize", "int8")
    source = convert.open_source(place / "model")
    model, params = models.build(source.config), convert.load(source)

    def rounded(name, w):
        if w.ndim < 3:
            return w
        scales = [part.abs().amax(-1, keepdim=True).div(127).expand_as(part) for part in w.float().split(64, -1)]
        scale = torch.cat(scales, -1)
        return (w.float() / scale).round().mul(scale).to(w.dtype)

    params = pytree.map_named(rounded, params)
    tokens = torch.tensor([[50, 60, 70, *lines[2, 0]["ids"]]])
    expected = models.logits(model, params, {"tokens": tokens}).float().log_softmax(-1)[0, 2:-1]
    expected = expected.gather(-1, tokens[0, 3:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(lines[2, 0]["log_probs"]), expected, rtol=0, atol=1e-4)
    plain = generate(out=tmp_path / "plain.jsonl")[2, 0]["log_probs"]
    assert (torch.tensor(plain) - expected)[0].abs() > 1e-4  # the first, of the same prompt
    base = (place / "model", "--prompts", place / "prompts.jsonl", "--out", tmp_path / "other.jsonl")
    refused(fz, "quantized: kind is 'int9' (did you mean int8?); use nf4", *base, "--quantize", "int9")


def test_settings_bind_from_the_first_completion_on(tmp_path):
    """A call that is refused behind them leaves a file of settings, and the corrected one begins anew."""
    out = tmp_path / "out.jsonl"
    open_completions(out, {"kernels": "canonical"}, [])
    open_completions(out, {"kernels": "auto"}, [])
    out.write_text('{"number": 0, "sample": 0}\n')
    with pytest.raises(ValueError, match="was begun with kernels 'auto', and here it is 'canonical'"):
        open_completions(out, {"kernels": "canonical"}, [])
    (tmp_path / "other.jsonl.settings.json").write_text('{"somebody": "else"}')
    with pytest.raises(ValueError, match="was begun with kernels None"):
        open_completions(tmp_path / "other.jsonl", {"kernels": "auto"}, [])


def test_a_line_alone_says_how_it_is_made_again(place, generate, fz, tmp_path):
    """In another batch and after preemptions; another model, and a number that is another one, are named."""
    exact = ("--kernels", "canonical")
    lines = generate(*exact, flags=("--max-tokens", 20, *ALONE[6:]))
    assert lines[2, 0]["request"] == {"ids": [50, 60, 70], "stop_ids": [77], "max_tokens": 3, "temperature": 0}
    some = [lines[1, 2], lines[3, 0], lines[1, 0]]
    path = chats.write_lines(tmp_path / "some.jsonl", some)
    tight = ("--rows", 3, "--step-tokens", 7, "--pages", 5)  # of the pages that one needs
    code, said, err = fz("generate", place / "model", "--replay", path, *exact, *tight)
    assert (code, said) == (0, "3 of 3 completions are the same, to the bit\n"), err
    numbers = some[1]["log_probs"]
    changed = {**some[1], "log_probs": [*numbers[:-1], float(np.nextafter(np.float32(numbers[-1]), np.float32(0)))]}
    chats.write_lines(path, [some[0], changed])
    code, said, err = fz("generate", place / "model", "--replay", path, *exact)
    assert code == 1 and f"{path}:2: log_probs[{len(numbers) - 1}] is " in said and "1 of 2 completions" in said
    base = ("--replay", path, *exact)
    refused(fz, f"{path}:1: was made with weights '", chats.qwen3_folder(tmp_path / "other", seed=1), *base)
    refused(fz, f"{path}:1: was made with kernels 'canonical', and here it is 'auto'", place / "model", *base[:2])
    refused(fz, "--temperature is for new completions", place / "model", *base, "--temperature", 0)
    refused(fz, "--prompts is missing; give --prompts and --out, or --replay", place / "model")
    for key, said in (("request", "request is missing"), ("sample", "is sample 7 of 3; remove the line")):
        chats.write_lines(
            path, [{k: v for k, v in some[0].items() if k != key} | ({"sample": 7} if key == "sample" else {})]
        )
        refused(fz, f"{path}:1: {said}", place / "model", *base)


def test_a_second_call_makes_what_is_missing(generate, tmp_path, place):
    out = tmp_path / "out.jsonl"
    generate()
    whole = out.read_text().splitlines()
    for count in (0, 2, 5):
        out.write_text("\n".join([*whole[:count], whole[count][:40]]))  # a kill cut the last one short
        again = generate()
        assert out.read_text().splitlines()[:count] == whole[:count] and len(again) == len(whole)
        assert sorted(out.read_text().splitlines()) == sorted(whole)
    before = os.stat(out).st_mtime_ns
    generate()
    assert os.stat(out).st_mtime_ns == before
    (tmp_path / "out.jsonl.rank-1").write_text(f"{whole[5]}\n{whole[0]}\n")  # of ranks that were stopped
    out.write_text("\n".join(whole[:5]) + "\n")
    generate()
    assert sorted(out.read_text().splitlines()) == sorted(whole) and not (tmp_path / "out.jsonl.rank-1").exists()


def test_what_differs_is_named(generate, tmp_path, place, fz):
    out, prompts, model = tmp_path / "out.jsonl", place / "prompts.jsonl", place / "model"
    generate()
    base = (model, "--prompts", prompts, "--out", out, *ALONE)
    refused(
        fz, f"{out}: was begun with seed 0, and here it is 3; give the former, or another --out", *base, "--seed", 3
    )
    refused(fz, "was begun with stop []", *base, "--stop", "x")
    refused(fz, "was begun with log_probs True, and here it is False", *base[:-1])
    other = chats.write_lines(tmp_path / "other.jsonl", PROMPTS[:3])
    refused(fz, "was begun with prompts '", model, "--prompts", other, "--out", out, *ALONE)
    heavier = chats.qwen3_folder(tmp_path / "other", seed=1)
    refused(fz, "was begun with weights '", heavier, "--prompts", prompts, "--out", out, *ALONE)
    said = "prompts.jsonl: is there, without prompts.jsonl.settings.json: no fzero generate wrote it; name another file"
    refused(fz, said, model, "--prompts", prompts, "--out", prompts, *ALONE)
    lines = out.read_text().splitlines()
    for line, said in (
        ('{"number": 9, "sample": 0}', "out.jsonl:7: is no completion of these prompts; remove the line"),
        (lines[2], "out.jsonl:7: is sample"),
        ("x", "out.jsonl:7: not JSON"),
    ):
        out.write_text("\n".join([*lines, line]) + "\n")
        refused(fz, said, *base)


BAD = {
    '{"prompt": ""}': "prompt 1 has no tokens; give at least one",
    '{"ids": []}': "prompt 1 has no tokens",
    '{"ids": [260]}': "prompt 1 has the token 260; the model has the ids 0 to 258",
    '{"ids": ["a"]}': "prompt 1 has the token 'a'",
    '{"prompt": "a", "stop": [""]}': "stop[0] is empty, which would end every text at once; leave it out",
    '{"prompt": "a", "n": 0}': "n is 0; it must be at least 1",
    '{"prompt": "a", "temprature": 0}': "has the key 'temprature' (did you mean temperature?); the keys are prompt, ",
    '{"prompt": "a", "ids": [1]}': "has prompt and ids; give one of prompt, messages, ids",
    '{"id": 1}': "has no prompt; give one of prompt, messages, ids",
    '{"prompt": "a", "id": 0}': "has the id 0 of line 1; give each its own",
    '{"prompt": "a", "id": 1.5}': "id is 1.5; it must be a text or a whole number",
    '{"prompt": "%s"}' % ("x" * 100): "prompt 1: 100 tokens and 8 more do not fit max_len=96",
    '{"prompt": "a", "max_tokens": 96}': "prompt 1: 1 tokens and 96 more do not fit max_len=96; ask for at most 95",
    '{"prompt": "a", "bias": {"300": 1.0}}': "bias has 300; the vocabulary has the ids 0 to 258",
    '{"messages": ["Hi"]}': "messages[0] is 'Hi'; it must be a table of role and content",
    '{"prompt": "a", "prompt": "b"}': "the key 'prompt' comes twice",
    "[1]": "not a JSON object, but a list",
    "x": "not JSON",
    "": "is empty, where JSON was to be",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named(line, place, tmp_path, fz):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    refused(fz, f"{path}:2: ", place / "model", "--prompts", path, "--out", tmp_path / "out.jsonl", *ALONE)
    refused(fz, BAD[line], place / "model", "--prompts", path, "--out", tmp_path / "out.jsonl", *ALONE)
    assert not (tmp_path / "out.jsonl").exists()


def test_bad_flags_are_one_line(place, tmp_path, fz):
    base = (place / "model", "--prompts", place / "prompts.jsonl", "--out", tmp_path / "out.jsonl")
    refused(fz, "none.jsonl: no such file", *base[:2], "none.jsonl", *base[3:])
    refused(fz, "none: no such folder", "none", *base[1:])
    refused(fz, "stop[0] is empty", *base, "--stop", "")
    refused(fz, "--n is 0; it must be at least 1", *base, "--n", 0)
    refused(fz, "top_k is 3 and temperature 0", *base, "--temperature", 0, "--top-k", 3)
    refused(fz, "--step-tokens is 4 and --rows 32, each of which computes a token of a step", *base, "--step-tokens", 4)
    refused(fz, "prompts.jsonl:1: its 3 tokens and up to 40 new ones need 3 pages of 16, and there are 1; give more "
            "pages, or a smaller max_tokens", *base, "--pages", 1, "--max-tokens", 40)  # fmt: skip
    refused(fz, "kernels: 'fast' is neither auto", *base, "--kernels", "fast")
    refused(fz, "--ema is for runs; leave it out, or import the model: fzero import", *base, "--ema")
    refused(fz, "--nvme needs --offload params=nvme", *base, "--nvme", tmp_path)
    (tmp_path / "none.jsonl").write_text("")
    refused(fz, "none.jsonl: has no prompts; give one a line", *base[:2], tmp_path / "none.jsonl", *base[3:])


@pytest.mark.parametrize(
    ("number", "expected", "words"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "stopped by SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_signal_keeps_what_has_ended(place, tmp_path, fz, number, expected, words):
    out, ended = tmp_path / "out.jsonl", threading.Event()
    many = chats.write_lines(tmp_path / "many.jsonl", [{"prompt": f"{i}+1", "id": f"{i}"} for i in range(1000)])

    def send():
        while not (out.exists() and out.read_bytes().count(b"\n") >= 3) and not ended.wait(0.01):
            pass
        if not ended.is_set():
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    args = ("generate", place / "model", "--prompts", many, "--out", out, "--max-tokens", 4)
    code, said, err = fz(*args)
    ended.set()
    lines = out.read_text().splitlines()
    assert (code, said) == (expected, "") and 3 <= len(lines) < 1000
    assert err == f"fzero: {words}: {len(lines)} of 1,000 completions are in {out}; the same command makes the others\n"
    assert all(json.loads(line)["finish"] for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_ranks_make_what_one_process_makes(mesh, place, tmp_path, generate):
    expected = generate(out=tmp_path / "one.jsonl")
    args = (place / "model", "--prompts", place / "prompts.jsonl", "--out", "two.jsonl", *ALONE, "--mesh", mesh)
    process = launched.start(tmp_path, 2, *args, verb="generate")
    assert process.wait(120) == 0, (tmp_path / "err").read_text()
    lines = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    actual = {(line["number"], line["sample"]): line for line in lines}
    assert len(lines) == len(expected) and not list(tmp_path.glob("two.jsonl.rank-*"))
    for key, line in expected.items():
        assert actual[key]["ids"] == line["ids"]
        np.testing.assert_allclose(actual[key]["log_probs"], line["log_probs"], atol=0 if mesh == "dp=2" else 1e-5)


@pytest.mark.slow
def test_weights_on_a_disk_say_the_same(place, generate, fz, tmp_path):
    expected = generate()
    assert fz("import", place / "model", "--out", tmp_path / "run")[0] == 0
    disk = ("--offload", "params=nvme", "--nvme", tmp_path / "disk")
    assert generate(*disk, source=tmp_path / "run", out=tmp_path / "disk.jsonl") == expected
