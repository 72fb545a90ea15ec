"""`fzero config`: every value with its meaning, a file that starts the same run, and what differs from a run's."""

import tomllib

import pytest

from fzero.core import flat
from fzero.run import config_table


@pytest.mark.parametrize("preset", ["gpt2-tiny", "llama-8b", "mixtral-tiny", "mlp-tiny"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_text_is_a_file_of_the_same_config(preset, optimizer):
    config = config_table.from_table({"preset": preset, "optim": {"name": optimizer}, "train": {"loggers": ["csv"]}})
    text = config_table.commented(config)
    table = tomllib.loads(text)
    config_table.refuse_unused(config, table)
    assert config_table.from_table(table) == config
    for name, value in flat(config_table.to_table(config)):
        assert value is None or f"{name.rpartition('.')[2]} = " in text, name


def test_comments_are_those_of_the_fields_and_name_the_defaults():
    lines = config_table.commented(config_table.from_table({"train": {"steps": 7}})).splitlines()
    assert "steps = 7  # (default 1000)" in lines
    assert 'states = "full"' in next(line for line in lines if line.startswith("# states"))
    assert any(line.startswith("slots = 2  # versions on the disk") for line in lines)
    assert any(line.startswith("snapshot_mb = 0  # memory of a rank") for line in lines)


def test_what_differs_from_a_run(fz, tmp_path):
    code, out, _ = fz("config", "--zero", "3", "--set", "train.steps=7")
    assert code == 0 and "zero = 3" in out and "steps = 7" in out
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(config_table.to_json(config_table.from_table({"preset": "mlp-tiny"})))
    code, out, _ = fz("config", "--config", run / "config.json", "--diff", run)
    assert (code, out) == (0, f"the config is that of {run}\n")
    code, out, _ = fz("config", "--config", run / "config.json", "--lr", "0.5", "--diff", run)
    assert code == 0 and len(out.splitlines()) == 1 and out.startswith("optim.lr = 0.5, not ")
    code, _, err = fz("config", "--diff", tmp_path / "none")
    assert code == 2 and "none" in err
