"""`fzero --help` shows every command once, in the order of work; `fzero models` every preset."""

import itertools
import shlex

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


def test_the_help_ends_with_three_examples_of_options_that_exist(fz):
    code, out, _ = fz("--help")
    shown = out.partition("Examples:\n")[2].splitlines()
    assert code == 0 and len(shown) == 3
    for line in shown:
        program, command, *args = shlex.split(line.strip().partition("  ")[0])
        assert program == "fzero"
        main.cli.commands[command].make_context(command, args)


def test_models_lists_every_preset_with_its_parameters(fz):
    code, out, _ = fz("models")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert code == 0 and [row[0] for row in rows] == [*PRESETS]
    assert next(row[:4] for row in rows if row[0] == "gpt2-124m") == ["gpt2-124m", "124,439,808", "12", "768"]
