"""`fzero --help` shows every command once, in the order of work; `fzero models` every preset."""

import itertools
import re
import shlex
from pathlib import Path

import click
import pytest

from fzero.cli import main
from fzero.models.presets import PRESETS


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
        (click.Option(["--n", "--number"], help="A number."), "x --n is also named --number"),
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


def test_models_lists_every_preset_with_its_parameters(fz):
    code, out, _ = fz("models")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert code == 0 and [row[0] for row in rows] == [*PRESETS]
    assert next(row[:4] for row in rows if row[0] == "gpt2-124m") == ["gpt2-124m", "124,439,808", "12", "768"]
