"""Transforms of rows: fill in the middle, span corruption, weights of tokens (fzero/data/batches.py)."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from data_cases import hand_made

from fzero import data
from fzero.run import from_table
from fzero.run.config import transforms
from fzero.run.config.transforms import sentinels_of, span_sentinels, weights_of

SENTINELS = data.Sentinels(901, 902, 903)


def changed_documents(batch, new, seen):
    """(tokens, those before without the end, whether it ends there, targets, mask, mask before) of each part of a
    document that a transform changed; of the others nothing may differ. seen: counts both."""
    assert torch.equal(new["documents"], batch["documents"])
    for row, documents in enumerate(batch["documents"]):
        for document in documents.unique().tolist():
            names, here = ("tokens", "mask", "targets"), documents == document
            old, was, before, its, counts, targets = (one[name][row][here] for one in (batch, new) for name in names)
            if torch.equal(old, its):
                seen["same"] += 1
                assert torch.equal(counts, was) and torch.equal(targets, before)
                continue
            seen["changed"] += 1
            over = not bool(was[-1])
            yield its, old[: len(old) - over].tolist(), over, targets, counts, was


def parts_of(text):
    """(prefix, middle, suffix) of a rearranged text."""
    text = text.tolist()
    pre, mid, suf = (text.index(token) for token in SENTINELS)
    if suf == pre + 1:  # SPM: prefix and middle one after the other
        return None, text[mid + 1 :], text[suf + 1 : mid]
    return text[pre + 1 : suf], text[mid + 1 :], text[suf + 1 : mid]


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
@pytest.mark.parametrize("spm", [0.0, 1.0])
def test_a_rearranged_document_has_its_tokens_but_three(packing, spm):
    stream = data.TokenStream(hand_made([7, 3, 40, 12, 5, 90, 6, 31, 8, 22] * 3), 32, 6, packing=packing)
    seen = Counter()
    for step in range(4):
        batch = stream.batch_at(step)
        new = data.fill_in_middle(batch, step * 6, 5, sentinels=SENTINELS, rate=0.8, spm=spm)
        for its, text, over, targets, counts, was in changed_documents(batch, new, seen):
            prefix, middle, suffix = parts_of(its[: len(its) - over])
            if prefix is None:
                assert middle + suffix == text[:-3]
            else:
                assert prefix + middle + suffix == text[:-3]
            assert torch.equal(targets[:-1], its[1:]) and torch.equal(counts[:-1], was[:-1])
            assert not counts[-1], "what follows the middle is not its end"
            assert not over or its[-1] == 0 == targets[-2]
    assert seen["changed"] > 10 and seen["same"] > 5


MARKS = [990, 991, 992, 993, 994]


def put_back(ids):
    """The text of which spans were taken out, and how many there were; its first part has each mark once."""
    second = next(i for i in range(len(ids)) if ids[i] == MARKS[0] and MARKS[0] in ids[:i])
    inputs, spans, found, current = ids[:second], {}, [], None
    for token in ids[second:]:
        if token in MARKS:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    for token in inputs:
        found += spans[token] if token in MARKS else [token]
    marks = [token for token in inputs if token in MARKS]
    assert marks == MARKS[: len(marks)] and list(spans) == MARKS[: len(marks) + 1] and ids[-1] == MARKS[len(marks)]
    assert all(spans[mark] for mark in marks) and not any(
        a in MARKS and b in MARKS for a, b in itertools.pairwise(inputs)
    )
    return found, second, len(marks)


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_a_document_whose_spans_are_taken_out_has_its_tokens(packing):
    stream = data.TokenStream(hand_made([7, 3, 40, 12, 5, 90, 6, 31, 8, 22] * 3), 32, 6, packing=packing)
    seen, gone = {"changed": 0, "same": 0}, []
    for step in range(6):
        batch = stream.batch_at(step)
        how = {"sentinels": MARKS, "rate": 0.8, "density": 0.3, "span": 2.0}
        new = data.corrupt_spans(batch, step * 6, 5, **how)
        for its, text, over, targets, counts, _ in changed_documents(batch, new, seen):
            found, second, spans = put_back(its[: len(its) - over].tolist())
            assert found == text[: len(text) - 2 * spans - 1]
            gone.append((len(text) - second - spans - 1) / len(found))
            assert torch.equal(targets[:-1], its[1:])
            assert not over or its[-1] == 0 == targets[-2]
            assert not counts[: second - 1].any() and counts[second - 1 : -1].all() and not counts[-1]
    assert seen["changed"] > 10 and seen["same"] > 5 and 0.2 < np.mean(gone) < 0.4


def test_a_sample_s_spans_and_targets_are_alike_in_every_batch():
    stream = data.TokenStream(hand_made([40, 12, 90, 31]), 16, 6)

    def change(n, count, seed):
        return data.corrupt_spans(stream.samples_at(n, count), n, seed, sentinels=MARKS)

    whole, parts = change(4, 6, 1), [change(n, 2, 1) for n in (4, 6, 8)]
    for name, leaf in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), leaf)
    assert not torch.equal(whole["mask"], change(4, 6, 2)["mask"])
    batch, weights = stream.samples_at(0, 6), torch.linspace(0, 3, 256)
    found = data.weigh_targets(batch, weights)["mask"]
    assert torch.equal(found, weights[batch["targets"]] * batch["mask"]) and 0 < found.count_nonzero() < found.numel()
    for call, said in (
        (lambda: data.corrupt_spans(batch, 0, 0, sentinels=[1]), "with 1 sentinels; wanted 1 or more, and 2"),
        (lambda: data.corrupt_spans(batch, 0, 0, sentinels=MARKS, density=2.0), "density is 2.0; it must be from 0"),
        (lambda: data.weigh_targets(batch, torch.tensor([-0.5])), "finite numbers, 0 or more, one for each"),
        (lambda: data.weigh_targets(batch, torch.ones(1)), "and there are 1 weights"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_a_sample_is_rearranged_alike_in_every_batch():
    stream = data.TokenStream(hand_made([40, 12, 90, 31]), 16, 6)
    whole = data.fill_in_middle(stream.samples_at(4, 6), 4, 1, sentinels=SENTINELS)
    parts = [data.fill_in_middle(stream.samples_at(n, 2), n, 1, sentinels=SENTINELS) for n in (4, 6, 8)]
    for name, leaf in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), leaf)
    other = data.fill_in_middle(stream.samples_at(4, 6), 4, 2, sentinels=SENTINELS)
    assert not torch.equal(whole["tokens"], other["tokens"])
    with pytest.raises(ValueError, match=r"rate is 1\.5; it must be from 0 to 1"):
        data.fill_in_middle(stream.samples_at(0, 1), 0, 0, sentinels=SENTINELS, rate=1.5)
    with pytest.raises(ValueError, match="the batch has no 'documents'"):
        data.fill_in_middle({"tokens": torch.zeros(1, 2)}, 0, 0, sentinels=SENTINELS)


def sentinels_beside(folder, *tokens):
    """A corpus whose BPE has some tokens more."""
    from tokenizers import Tokenizer

    text = folder / "text.txt"
    text.write_text("".join(f"one {n} two {n * n} three. " for n in range(300)))
    data.prepare(text, folder / "plain", tokenizer="bpe:270", val_fraction=0.1)
    library = Tokenizer.from_str((folder / "plain" / "tokenizer.json").read_text())
    library.add_special_tokens(list(tokens))
    library.save(str(folder / "tokenizer.json"))
    data.prepare(text, folder / "corpus", tokenizer=folder / "tokenizer.json", val_fraction=0.1)
    return folder / "corpus"


def test_the_tokens_of_a_middle_are_the_tokenizers_or_the_users(tmp_path):
    place = sentinels_beside(tmp_path, "<fim_suffix>", "<fim_middle>", "<fim_prefix>", "<own>")
    assert sentinels_of("", place) == data.Sentinels(prefix=272, middle=271, suffix=270)
    assert sentinels_of("<own>,<fim_middle>,<fim_suffix>", place) == (273, 271, 270)
    assert sentinels_of("3,2,1", place) == (3, 2, 1)
    for text, words in {
        "<own>,<fim>,<fim_suffix>": "has no token '<fim>'",
        "<own>,<|endoftext|>,<fim_suffix>": "ends documents with one of them",
        "<own>,273,<fim_suffix>": "has the token 273 twice",
        "1,2,3-4": "which are 4 tokens; it is PREFIX,MIDDLE,SUFFIX",
        "1,2,274": "ids of .* are below 274",
    }.items():
        with pytest.raises(ValueError, match=words):
            sentinels_of(text, place)
    with pytest.raises(ValueError, match=r"none of the usual tokens for it .*give data.fim_tokens=PREFIX"):
        sentinels_of("", tmp_path / "plain")
    data.prepare(tmp_path / "text.txt", tmp_path / "bytes", val_fraction=0.1)
    assert sentinels_of("", tmp_path / "bytes") == (253, 254, 255)
    with pytest.raises(ValueError, match="of bytes give ids, such as 253,254,255"):
        sentinels_of("a,b,c", tmp_path / "bytes")


def test_the_tokens_of_spans_are_the_tokenizers_or_the_users(tmp_path):
    place = sentinels_beside(tmp_path, "<extra_id_1>", "<extra_id_0>", "<extra_id_3>", "<own>")
    assert span_sentinels("", place) == [271, 270]  # those that follow one another
    assert span_sentinels("<own>,5-7,<extra_id_0>", place) == [273, 5, 6, 7, 271]
    for text, words in {
        "<own>": "which is one token; it is the tokens that stand for the spans",
        "<own>,<other>": "has no token '<other>'",
        "7-5": "has 7-5; ids of .* are below 274, in rising order",
        "270-274": "ids of .* are below 274",
        "5-7,6": "has the token 6 twice",
    }.items():
        with pytest.raises(ValueError, match=words):
            span_sentinels(text, place)
    with pytest.raises(ValueError, match=r"has no <extra_id_0>, <extra_id_1>, ...; give data.sentinel_tokens, the"):
        span_sentinels("", tmp_path / "plain")
    data.prepare(tmp_path / "text.txt", tmp_path / "bytes", val_fraction=0.1)
    never = span_sentinels("", tmp_path / "bytes")
    assert len(never) == 13 and not {*never} & {*"".join(map(chr, range(1, 0x800))).encode(), *"\U0010ffff".encode()}


def test_weights_are_of_tokens_or_a_file_of_all(tmp_path):
    place = sentinels_beside(tmp_path, "<own>", "<a=b>")
    weights = weights_of("<own>=0,<a=b>=2.5,3-4=.25", place)
    assert weights[[270, 271, 3, 4]].tolist() == [0, 2.5, 0.25, 0.25] and weights.sum() == 272 - 1 + 1.5 - 1.5
    values = np.random.default_rng(0).random(272, np.float32)
    np.save(tmp_path / "own.npy", values)
    began = transforms.with_digest(str(tmp_path / "own.npy"))
    assert began == transforms.with_digest(began) != transforms.with_digest("1=0.5")
    assert torch.equal(weights_of(began, place), torch.from_numpy(values).double())
    for wrong, words in (
        (values[1:], r"is float32 \[271\]; data.token_weights of this corpus is a vector of 272 numbers of 0 or more"),
        (values - 1, "is a vector of 272 numbers of 0 or more"),
        (values * np.inf, "is a vector of 272 numbers of 0 or more"),
        (np.array(["a"] * 272), "is a vector of 272 numbers of 0 or more"),
    ):
        np.save(tmp_path / "own.npy", wrong)
        with pytest.raises(ValueError, match=words):
            weights_of(str(tmp_path / "own.npy"), place)
    with pytest.raises(ValueError, match=r"and the file is [0-9a-f]{16} by now; put the other one back, or start a"):
        weights_of(began, place)
    for text, words in (("<ow>=0", "has no token '<ow>'"), ("272=0", "ids of .* are below 272")):
        with pytest.raises(ValueError, match=words):
            weights_of(text, place)


@pytest.mark.parametrize(
    "own, words",
    [
        ({"noise_density": 0.2}, "data.noise_density is 0.2 and data.span_corruption is 0; give the part"),
        ({"sentinel_tokens": "1,2"}, "data.sentinel_tokens is '1,2' and data.span_corruption is 0"),
        ({"span_corruption": 1.5}, "data.span_corruption is 1.5; it must be at least 0 and at most 1"),
        ({"span_corruption": 0.5, "fim": 0.5}, "data.fim is 0.5, which rearranges them too"),
        ({"span_corruption": 0.5, "noise_density": 1.0}, "data.noise_density is 1.0; it must be above 0 and below 1"),
        ({"span_corruption": 0.5, "mean_noise_span_length": 0.5}, "data.mean_noise_span_length is 0.5; it must be at"),
        ({"token_weights": "1"}, "has '1'; it is TOKEN=WEIGHT,..., tokens or their ids"),
        ({"token_weights": "1=0.5,2=-1.5"}, "has '2=-1.5'; it is TOKEN=WEIGHT"),
        ({"token_weights": "=0.5"}, "has '=0.5'; it is TOKEN=WEIGHT"),
        ({"token_weights": "1=0.5", "objective": "dpo"}, "the loss of objective=dpo is no mean of tokens; leave it"),
        ({"span_corruption": 0.5, "objective": "chat"}, "data.span_corruption is 0.5 and objective is chat; it takes"),
        ({"fim_tokens": "1,2,3"}, "data.fim_tokens is '1,2,3' and data.fim is 0"),
        ({"fim": 0.5, "fim_tokens": "1,2"}, "it is PREFIX,MIDDLE,SUFFIX"),
        ({"fim": 1.5}, "data.fim is 1.5; it must be at least 0 and below 1"),
    ],
)
def test_settings_of_transforms_are_refused_in_a_line(own, words):
    with pytest.raises(ValueError, match=words):
        objective = own.get("objective", "text")
        rest = {key: value for key, value in own.items() if key != "objective"}
        from_table({"preset": "mlp-tiny", "objective": objective, "data": rest})
