"""Values beside a state: each rank's come back to it, from any mesh where they are equal; nothing of them is run."""

import collections

import pytest
import ranks
import torch

import fzero
from fzero import checkpoint, models, optim, state_specs
from fzero.checkpoint import restore_state
from fzero.sharding import Spec
from fzero.train import meta_state

Point = collections.namedtuple("Point", "x y")
VALUE = {
    "epoch": 3,
    "rates": [0.1, float("inf"), None, True],
    "text": "ä/\n",
    "raw": [b"\x00\xff", b""],
    "pair": (1, (2,), ()),
    "empty": [{}, [], torch.empty(0, 3, dtype=torch.bfloat16), torch.tensor(2.5)],
    (1, "a"): -(2**70),
    7: torch.arange(5, dtype=torch.int16),
    "rng": torch.Generator().manual_seed(1).get_state(),
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_a_value_comes_back_and_the_state_is_restored_without_it(tmp_path):
    path = checkpoint.save(tmp_path, {"w": torch.ones(2)}, step=1, extras={"loader": VALUE, "big": b"x" * 5000})
    assert same(checkpoint.read_extra(path, "loader"), VALUE)
    assert checkpoint.read_extra(path, "big") == b"x" * 5000
    assert torch.equal(checkpoint.restore(path, {"w": torch.empty(2)})["w"], torch.ones(2))
    assert checkpoint.verify(path) == []


def test_one_writer_takes_values_of_growing_size(tmp_path):
    writer = checkpoint.Writer(tmp_path)
    for step in range(4):
        writer.save({"w": torch.ones(2)}, step=step, extras={"seen": list(range(700 * step))})
    writer.wait()
    writer.close()
    assert [len(checkpoint.read_extra(checkpoint.step_folder(tmp_path, i), "seen")) for i in range(4)] == [
        0,
        700,
        1400,
        2100,
    ]


def test_mistakes_are_one_line(tmp_path):
    for value, said in (
        ({"a": [1, torch.Generator()]}, r"extra loader\['a'\]\[1\] is a Generator; an extra is made of numbers"),
        ({(1, 2): Point(1, 2)}, r"extra loader\[\(1, 2\)\] is a Point"),
        (torch.ones(2, dtype=torch.complex64), "extra loader is a Tensor"),
    ):
        with pytest.raises(ValueError, match=said):
            checkpoint.save(tmp_path, {"w": torch.ones(2)}, step=1, extras={"loader": value})
    with pytest.raises(ValueError, match="has a part called extras, where values beside a state are; rename it"):
        checkpoint.save(tmp_path, {"extras": {"w": torch.ones(2)}}, step=1)
    path = checkpoint.save(tmp_path, {"w": torch.ones(2)}, step=1, extras={"loader": 1})
    with pytest.raises(ValueError, match=r"has no extra 'lauder' \(did you mean loader\?\); it has loader"):
        checkpoint.read_extra(path, "lauder")


def saved_by(mesh, folder, own):
    value = {"rank": mesh.data_rank if own else 0, "more": b"x" * (900 * mesh.data_rank if own else 5)}
    path = checkpoint.save(folder, {"w": torch.ones(2)}, step=1, specs={"w": Spec()}, mesh=mesh, extras={"v": value})
    return same(checkpoint.read_extra(path, "v", mesh), value), path


@pytest.mark.parametrize("own", [True, False])
def test_ranks_have_values_of_their_own(own, tmp_path):
    results = ranks.run(4, saved_by, tmp_path, own, mesh={"dp": 2, "tp": 2})
    assert all(equal for equal, _ in results)
    path = results[0][1]
    assert checkpoint.read_extra(path, "v", fzero.fake_mesh({"dp": 2}, rank=1))["rank"] == (1 if own else 0)
    if own:
        with pytest.raises(ValueError, match="extra 'v' is of 2 data ranks, each with its own, and this mesh has 1"):
            checkpoint.read_extra(path, "v")
    else:
        assert checkpoint.read_extra(path, "v")["rank"] == 0


def test_a_run_restores_a_state_that_was_saved_with_extras(tmp_path):
    model, tx = models.mlp(models.MLPConfig(8, 4, 1, 2)), optim.sgd(0.1)
    plan = fzero.zero_plan(0, model, fzero.one_process())
    path = checkpoint.save(tmp_path, fzero.init_state(model, tx, plan, seed=0), step=0, extras={"loader": 1})
    again = restore_state.restore_state(path, meta_state(plan, tx), state_specs(plan, tx), plan, None)
    assert torch.equal(again.params["head"]["w"], fzero.init_state(model, tx, plan, seed=0).params["head"]["w"])
