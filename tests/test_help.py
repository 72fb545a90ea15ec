"""`fzero --help` shows every command once, in the order of work; `fzero models` every preset."""

import itertools
import re
import shlex
from pathlib import Path

import click
import pytest

from fzero import models
from fzero.cli import main


def test_every_command_is_in_one_section():
    assert sorted(itertools.chain(*main.SECTIONS.values())) == sorted(main.cli.commands)


@pytest.mark.parametrize("name", main.cli.commands)
def test_the_help_shows_a_whole_short_sentence_for_each_command(fz, name):
    _, out, _ = fz("--help")
    sentence = main.first_sentence(main.cli.commands[name].help)
    assert sentence in " ".join(out.split()), sentence
    assert 5 <= len(sentence.split()) <= 20 and sentence[0].isupper() and "..." not in sentence
    assert sentence[-2] not in ",. ", sentence


def test_the_help_of_data_names_its_commands():
    group = main.cli.commands["data"]
    assert re.findall(r"\w+", group.help.lower().partition(" the text")[0].replace(" and ", " ")) == [*group.commands]


def test_the_help_ends_with_three_examples_of_options_that_exist(fz):
    code, out, _ = fz("--help")
    shown = out.partition("Examples:\n")[2].splitlines()
    assert code == 0 and len(shown) == 3
    for line in shown:
        program, command, *args = shlex.split(line.strip().partition("  ")[0])
        assert program == "fzero"
        main.cli.commands[command].make_context(command, args)


ROOT = Path(__file__).parent.parent


def options_of(command, path=()):
    """(path, option) of each option of a command and of the commands below it."""
    below = command.commands if isinstance(command, click.Group) else {}
    return [(path, option) for option in command.params if isinstance(option, click.Option)] + [
        pair for name, one in below.items() for pair in options_of(one, (*path, name))
    ]


def meaning(option):
    """What is the same wherever a flag of this name is: the kind of its value, and the first sentence of its help."""
    return option.type.to_info_dict(), option.is_flag, option.nargs, main.first_sentence(option.help)


def clashes(options):
    """A line for each name with two meanings, each meaning with two names, and each option with two names."""
    names, meanings, found = {}, {}, []
    for path, option in options:
        where = f"{' '.join(path)} {option.opts[0]}"
        if len(option.opts) > 1:
            found.append(f"{where} is also named {', '.join(option.opts[1:])}")
        if names.setdefault(option.opts[0], meaning(option)) != meaning(option):
            found.append(f"{where} means {meaning(option)}, elsewhere {names[option.opts[0]]}")
        if meanings.setdefault(main.first_sentence(option.help), option.opts[0]) != option.opts[0]:
            found.append(f"{where} means what {meanings[main.first_sentence(option.help)]} means")
    return found


def test_each_flag_has_one_meaning_and_each_meaning_one_flag():
    options = options_of(main.cli)
    assert len(options) > 100 and len({option.opts[0] for _, option in options}) > 50
    assert not clashes(options), "\n".join(clashes(options))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (click.Option(["--seed"], type=float, help="The seed of all random numbers."), "x --seed means"),
        (click.Option(["--seed"], type=int, help="The seed of the weights. Default: 0."), "x --seed means"),
        (click.Option(["--json"], help="Print JSON in place of text."), "x --json means"),
        (click.Option(["--key"], type=int, help="The seed of all random numbers."), "x --key means what --seed means"),
        (click.Option(["--m", "--number"], help="A number."), "x --m is also named --number"),
    ],
)
def test_a_flag_of_another_meaning_is_found(given, said):
    (line,) = clashes([*options_of(main.cli), (("x",), given)])
    assert line.startswith(said)


def test_the_documents_give_a_command_only_flags_that_it_has():
    found = []
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))):
        for line in page.read_text().splitlines():
            for name, rest in re.findall(r"\bfzero (\w+)\b([^`|#;]*)", line):
                command, first = main.cli.commands.get(name), rest.split(maxsplit=1)[:1]
                below = getattr(command, "commands", {})
                command = below.get(first[0], command) if first else command
                has = [n for _, o in options_of(command) for n in (*o.opts, *o.secondary_opts)] if command else []
                flags = re.findall(r"(?<=\s)--[a-z][a-z-]*", rest) if command else []
                found += [f"{page.name}: fzero {name} has no {flag}" for flag in flags if flag not in has]
    assert not found, "\n".join(found)


# Parameters, layers, width, vocabulary, longest sequence, d_ff, and heads (of queries / of keys and values).
SIZES = """
gpt2-tiny 3487232 4 256 256 1024 1024 4
gpt2-124m 124439808 12 768 50257 1024 3072 12
gpt2-355m 354823168 24 1024 50257 1024 4096 16
gpt2-774m 774030080 36 1280 50257 1024 5120 20
gpt2-1.5b 1557611200 48 1600 50257 1024 6400 25
gpt-7.5b 7467786240 36 4096 51200 2048 16384 32
gpt-18b 18449756160 40 6144 51200 2048 24576 48
gpt-39b 39096041472 48 8192 51200 2048 32768 64
gpt-76b 76050739200 60 10240 51200 2048 40960 80
gpt-145b 145622261760 80 12288 51200 2048 49152 96
gpt-310b 310130540544 96 16384 51200 2048 65536 128
gpt-530b 529600819200 105 20480 51200 2048 81920 128
gpt-1t 1008038758400 128 25600 51200 2048 102400 160
llama-tiny 3082496 4 256 256 1024 704 4/2
llama-small 23863808 8 512 256 1024 1408 8/4
llama-1b 1235814400 16 2048 128256 131072 8192 32/8
llama-3b 3212749824 28 3072 128256 131072 8192 24/8
llama-8b 8030261248 32 4096 128256 131072 14336 32/8
llama-70b 70553706496 80 8192 128256 131072 28672 64/8
llama-405b 405853388800 126 16384 128256 131072 53248 128/8
llama2-7b 6738415616 32 4096 32000 4096 11008 32
llama2-13b 13015864320 40 5120 32000 4096 13824 40
llama2-70b 68976648192 80 8192 32000 4096 28672 64/8
qwen2.5-7b 7615616512 28 3584 152064 131072 18944 28/4
qwen2.5-72b 72706203648 80 8192 152064 131072 29568 64/8
qwen3-8b 8190735360 36 4096 151936 40960 12288 32/8
qwen3-32b 32762123264 64 5120 151936 40960 25600 64/8
mistral-7b 7241732096 32 4096 32000 32768 14336 32/8
mistral-7b-v0.3 7248023552 32 4096 32768 32768 14336 32/8
olmo2-7b 7298617344 32 4096 100352 4096 11008 32
olmo2-13b 13716198400 40 5120 100352 4096 13824 40
phi3-mini 3821079552 32 3072 32064 4096 8192 32
smollm3-3b 3075098624 36 2048 128256 65536 11008 16/4
gemma2-2b 2614341888 26 2304 256000 8192 9216 8/4
gemma2-9b 9241705984 42 3584 256000 8192 14336 16/8
gemma2-27b 27227128320 46 4608 256000 8192 36864 32/16
gemma3-1b 999885952 26 1152 262144 32768 6912 4/1
gemma3-4b 3880263168 34 2560 262208 131072 10240 8/4
gemma3-12b 11766034176 48 3840 262208 131072 15360 16/8
gemma3-27b 27009346304 62 5376 262208 131072 21504 32/16
mixtral-tiny 4084416 4 192 256 1024 384 4/2
mixtral-8x7b 46702792704 32 4096 32000 32768 14336 32/8
gpt-oss-tiny 2326496 4 192 256 1024 192 4/2
gpt-oss-20b 20914757184 24 2880 201088 131072 2880 64/8
gpt-oss-120b 116829156672 36 2880 201088 131072 2880 64/8
deepseek-tiny 2763608 4 192 256 1024 512 4
deepseek-v3 671026419200 61 7168 129280 4096 18432 128
mlp-tiny 24640 2 32 256 1024 64 -
"""


def test_models_lists_every_preset_with_its_sizes(fz):
    code, out, _ = fz("models")
    rows, known = ([line.split() for line in text.strip().splitlines()] for text in (out, SIZES))
    assert code == 0 and [[cell.replace(",", "") for cell in row] for row in rows[1:]] == [row[:6] for row in known]
    assert [row[0] for row in known] == list(models.PRESETS)
    for name, *_, d_ff, heads in known:
        config = models.preset(name)
        assert config.d_ff == int(d_ff), name
        if heads != "-":
            q, *kv = (int(number) for number in heads.split("/"))
            assert (q, *kv) == ((config.n_heads, config.n_kv_heads) if kv else (config.n_heads,)), name
