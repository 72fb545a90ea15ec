"""Tables of configs that earlier versions wrote, by the keys that this version has; it imports no torch."""

from __future__ import annotations

from fzero.core.config_tables import Table

# Keys that this version does not have, with the values that were none: any other one is an unknown key.
ENDED = {"local": {"fragments": 1, "overlap": 0, "mix": 0.0}}


def current_keys(table: Table) -> Table:
    """The table of a config that fzero wrote, by today's keys; in a user's table an earlier key is an error.

    >>> current_keys({"zero": 2, "accumulate": "full"})
    {'zero': 2, 'reduce': 'once'}
    """
    if not isinstance(table, dict):
        return table  # whoever reads it says what is wrong
    table = {key: dict(value) if isinstance(value, dict) else value for key, value in table.items()}
    table.pop("sha256", None)  # of config.json: of its content, see run_folder.py
    # `accumulate` was shards or full; full went with no other `reduce` than fast.
    if table.get("accumulate") in ("shards", "full") and table.pop("accumulate") == "full":
        table["reduce"] = "once"
    # `local.lr` and `local.momentum` of 0 were the method's own. A rate of 0 is none today, so it tells such a table.
    local = table.get("local")
    if isinstance(local, dict) and local.get("lr") == 0:
        table["local"] = {key: value for key, value in local.items() if key not in ("lr", "momentum") or value}
    for part, keys in ENDED.items():
        if isinstance(of := table.get(part), dict):
            table[part] = {key: value for key, value in of.items() if key not in keys or value != keys[key]}
    # `mlp_tiles` was a field of `train`.
    train = table.get("train")
    if isinstance(train, dict) and (tiles := train.pop("mlp_tiles", 1)) != 1:
        table.setdefault("model", {})["mlp_tiles"] = tiles
    return table
