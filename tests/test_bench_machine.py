"""`fzero bench`: device files are read as they were written, figures are of what they say, and each part of a machine
is measured."""

import dataclasses
import json
import math
import os

import pytest
import ranks as pools
import torch

from fzero.kernels import attention_tiled, registry
from fzero.planner import devices, machine
from fzero.planner.calibrate import case_timer, memory, step_operators
from fzero.planner.calibrate import case_timer as processes
from fzero.planner.calibrate.case_timer import Case, Figure
from fzero.planner.launch import list_devices
from fzero.run import device_file


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("FZERO_TRACEBACK", raising=False)


@pytest.fixture
def short(monkeypatch):
    """Next to no time for each part, a small grid of products, and no large heap."""
    monkeypatch.setattr(machine, "SECONDS", dict.fromkeys(machine.SECONDS, 0.01))
    monkeypatch.setattr(memory, "shapes", lambda quick: [(1, 8, 8, 8), (2, 4, 8, 16)])
    monkeypatch.setattr(memory, "SIZES", (4 << 10, 16 << 10))
    monkeypatch.setattr(memory, "FEW", (4 << 10, 8 << 10, 16 << 10))
    monkeypatch.setattr(step_operators, "LADDER", step_operators.LADDER[:1])
    monkeypatch.setattr(step_operators, "QUICK", step_operators.LADDER[:1])
    monkeypatch.setattr(case_timer, "_KEPT", [torch.zeros(1)])


RATES = devices.MeasuredRates(
    1,
    1,
    ((12288.0, 1e-6), (3e6, 1e-4)),
    {"float32": ((1, 8, 8, 8, 1e-6),)},
    {"norm/float32": ((1e6, 1e-4),)},
    {"eager": 1e-5},
    {},
    1.1,
)
HERE = devices.Device(
    name="some processor",
    kind="cpu",
    measured=True,
    processors=2,
    memory_bytes=10 << 30,
    reserved_bytes=1 << 30,
    margin=0.1,
    flops={"float32": 1e11},
    bandwidth_bytes_s=3e10,
    links=(devices.Level("this machine", "gloo", None, 1.5e9, 1e-4, 2.5e9, 1e-5, 0.25),),
    rates=(RATES, RATES._replace(threads=2), RATES._replace(processes=2)),
    collectives={"psum/2": ((1024.0, 1e-4),)},
    machine={"torch": "2"},
)

# ---- device files
# ------------------------------------------------------------------------------------------------------


def test_a_device_file_is_read_as_it_was_written(tmp_path):
    text = devices.to_json(HERE)
    assert devices.from_json(text, "here.json") == HERE and devices.to_json(devices.from_json(text, "")) == text
    assert max(map(len, text.splitlines())) < 160
    machine.save(HERE, tmp_path / "new" / "here.json")
    assert devices.device(tmp_path / "new" / "here.json", price_per_hour=2.0) == dataclasses.replace(
        HERE, price_per_hour=2.0
    )
    assert os.listdir(tmp_path / "new") == ["here.json"]


@pytest.mark.parametrize("name", list_devices())
def test_listed_devices_are_complete(name):
    found = devices.device(name)
    assert (
        found == devices.device(name.upper())
        and not found.measured
        and found.kind == "cuda"
        and found.price_per_hour is None
        and not found.rates
    )
    assert found.target == ("cuda", found.processors, found.capability, found.name)
    part, h100 = found.efficiency, devices.device("h100").efficiency
    libraries = {key for key in h100 if "/" in key} if found.capability == (9, 0) else set()  # of attention, on Hopper
    assert set(part) == {key for key in h100 if "/" not in key} | libraries
    assert all(part[key] == h100[key] for key in ("memory", "links", "host"))
    assert all(part[key] / part["gemm"] == pytest.approx(h100[key] / h100["gemm"], rel=0.03) for key in libraries)
    # Attention runs on the units of products, under the same power.
    assert part["attention_forward"] / part["gemm"] == pytest.approx(0.48 / 0.78, rel=0.03)
    assert {"float32", "bfloat16", "float16", "float64", "tensorfloat32"} <= set(found.flops) and all(
        0.3e12 < f < 1e16 for f in found.flops.values()
    )
    assert (
        found.flops["bfloat16"] == found.flops["float16"] == pytest.approx(2 * found.flops["tensorfloat32"], rel=0.03)
    )
    assert (
        found.links[0].ranks in (1, 8, 72)
        and found.links[-1].ranks is None
        and found.links[0].bytes_s >= found.links[-1].bytes_s
    )
    assert 0.8 * found.memory_bytes < found.capacity_bytes < found.memory_bytes - found.reserved_bytes
    for field in (
        "flops",
        "memory_bytes",
        "bandwidth_bytes_s",
        "host_memory_bytes_s",
        "host",
        "efficiency",
        "reserved_bytes",
        "margin",
        "launch_s",
        "op_s",
    ):
        assert found.sources[field], field
    assert sum("links" in key for key in found.sources) >= 3


def test_listed_figures_are_those_of_the_data_sheets():
    found = {name: devices.device(name) for name in list_devices()}
    assert {
        name: (d.flops["bfloat16"] / 1e12, d.bandwidth_bytes_s / 1e9, d.links[0].bytes_s / 1e9, d.processors)
        for name, d in found.items()
    } == {
        "a100": (312, 2039, 300, 108),
        "a100-40gb": (312, 1555, 300, 108),
        "h100": (989.4, 3350, 450, 132),
        "h200": (989.4, 4800, 450, 132),
        "b200": (2250, 8000, 900, 148),
        "mi300x": (1307.4, 5300, 448, 304),
        "mi325x": (1307.4, 6000, 448, 304),
        "h100-500w": (989.4, 2400, 450, 132),
        "h800": (989.4, 3350, 200, 132),
        "gh200": (989.4, 4000, 50, 132),
        "gb200": (2500, 8000, 900, 148),
        "4090": (165.2, 1008, 31.5, 128),
        "5090": (209.5, 1792, 31.5 * 2, 170),
        "l40s": (362.05, 864, 31.5, 142),
        "a10g": (70, 600, 31.5, 80),
    }
    gb = {"a100": 80, "a100-40gb": 40, "h100": 80, "h800": 80, "h100-500w": 96, "h200": 141, "b200": 180, "mi300x": 192}
    gb |= {"mi325x": 256, "gh200": 96, "gb200": 186, "4090": 24, "5090": 32, "l40s": 48, "a10g": 24}
    assert all(0.97 * gb[name] < d.memory_bytes / 1e9 < 1.08 * gb[name] for name, d in found.items())


def test_capacity_is_what_is_left_for_tensors():
    assert HERE.capacity_bytes == int(9 * (1 << 30) * 0.9) and HERE.cores == 2 and HERE.target.kind == "cpu"


def test_the_nearest_rates_serve():
    assert (
        HERE.rates_of(1, 1) is HERE.rates[0] and HERE.rates_of(2) is HERE.rates[1] and HERE.rates_of(8) is HERE.rates[1]
    )
    assert HERE.rates_of(1, 2) is HERE.rates[2] and HERE.rates_of(1, 4) is HERE.rates[2]
    assert devices.device("h100").rates_of(1) is None


def changed(key, value):
    table = json.loads(devices.to_json(HERE))
    *parents, last = key
    inner = table
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    return json.dumps(table)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (("processor",), 2, "unknown key 'processor' (did you mean processors?); the keys are name, kind"),
        (("rates", 0, "thread"), 2, "unknown key 'rates[0].thread' (did you mean threads?)"),
        (("processors",), "2", 'processors is "2"; it must be a whole number'),
        (("processors",), 2.5, "processors is 2.5; it must be a whole number"),
        (("processors",), True, "processors is true; it must be a whole number"),
        (("processors",), 0, "processors is 0; it must be above 0"),
        (("measured",), 1, "measured is 1; it must be true or false"),
        (("kind",), "tpu", "kind is 'tpu'; it must be cpu or cuda"),
        (("margin",), 1.0, "margin is 1.0; it must be at least 0 and below 1"),
        (("margin",), float("nan"), "margin is NaN; it must be a number"),
        (("reserved_bytes",), 10 << 30, "reserved_bytes is 10737418240; it must be at least 0 and below memory_bytes"),
        (("flops",), [1], "flops is [1]; it must be a table"),
        (("flops", "float32"), "fast", 'flops.float32 is "fast"; it must be a number'),
        (("capability",), [9], "capability is [9]; it must be a list of 2 values"),
        (("links",), [], "links is []; there must be one level at least"),
        (("links", 0), 3, "links[0] is 3; it must be a table of name, kind, ranks"),
        (("links", 0, "ranks"), "all", 'links[0].ranks is "all"; it must be a whole number'),
        (("rates",), [], "rates is [] in a measured file"),
        (("rates", 0, "bandwidth", 1), [1.0], "rates[0].bandwidth[1] is [1.0]; it must be a list of 2 values"),
        (
            ("rates", 0, "gemm", "float32", 0),
            [1, 8, 8.5, 8, 1e-6],
            "rates[0].gemm.float32[0][2] is 8.5; it must be a whole number",
        ),
        (("measured",), False, "efficiency has nothing; a listed device needs gemm and memory"),
    ],
)
def test_a_wrong_device_file_is_one_clear_error(key, value, said):
    with pytest.raises(ValueError) as raised:
        devices.from_json(changed(key, value), "dev.json")
    text = str(raised.value)
    assert (
        text.startswith(f"dev.json: {said}")
        and "\n" not in text
        and text.endswith("; correct it, or run `fzero bench` again")
    )


def test_a_missing_key_and_no_json():
    table = json.loads(devices.to_json(HERE))
    del table["memory_bytes"]
    with pytest.raises(ValueError, match=r"dev\.json: memory_bytes is missing"):
        devices.from_json(json.dumps(table), "dev.json")
    with pytest.raises(ValueError, match=r"dev\.json: not JSON"):
        devices.from_json("{", "dev.json")
    with pytest.raises(ValueError, match=r"dev\.json: not a JSON object"):
        devices.from_json("[]", "dev.json")


def test_names_that_are_no_device(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"device 'h1000' is not known \(did you mean h100\?\); the devices are 4090, .*, here \(after `fzero "
        r"bench`\)",
    ):
        devices.device("h1000")
    with pytest.raises(
        ValueError, match=r"device 'here': there is no .*device\.json; run `fzero bench` on this machine first"
    ):
        devices.device("here")
    with pytest.raises(ValueError, match=r"none\.json: no such file; give a device file"):
        devices.device(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bytes\.json: is not UTF-8"):
        devices.device(tmp_path / "bytes.json")
    machine.save(HERE, device_file())
    assert devices.device("here") == HERE


# ---- figures
# -----------------------------------------------------------------------------------------------------------


def test_a_figure_is_the_first_quartile():
    assert case_timer.figure([9.0, 2.0, 1.0, 100.0, 4.0]) == Figure(2.0, 4.0, 1.0)
    assert case_timer.figure([3.0]) == Figure(3.0, 1.0, 3.0)
    assert (
        case_timer.spread_of([Figure(1, 1.0), Figure(1, 3.0), Figure(1, 1.5)]) == 1.5
        and case_timer.spread_of([]) == 1.0
    )


def test_cases_take_turns_and_are_timed_by_call(monkeypatch):
    ran, now = [], [0.0]
    monkeypatch.setattr(case_timer, "clock", lambda threads, _: lambda: now[0])

    def case(name, seconds):
        def call():
            ran.append(name)
            now[0] += seconds

        return Case((name,), lambda: call)

    found = case_timer.time_cases([case("slow", 0.5), case("quick", case_timer.LEAST_S / 4)], 100.0, rounds=3)
    assert found["slow",].s == pytest.approx(0.5) and found["quick",].s == pytest.approx(case_timer.LEAST_S / 4)
    turns = ran[4:]  # after two of each that prepare
    assert turns == (["slow"] * 2 + ["quick"] * 4) * 3


def test_a_case_is_measured_where_there_is_no_time():
    assert set(case_timer.time_cases([Case((i,), lambda: lambda: None) for i in range(40)], 0.0)) == {
        (i,) for i in range(40)
    }


def test_one_thread_is_timed_by_its_own_time():
    import time

    assert case_timer.clock(1) is time.thread_time and case_timer.clock(2) is time.perf_counter
    with case_timer.on_threads(1):
        assert torch.get_num_threads() == 1


def test_points_of_a_curve():
    sizes = {100.0: Figure(1.0), 150.0: Figure(4.0), 1000.0: Figure(10.0)}
    assert case_timer.curve_of(sizes) == ((pytest.approx(122.47), 2.0), (1000.0, 10.0))
    assert case_timer.curve_of({}) == ()
    assert case_timer.round_rates(1.23456789e-5) == 1.2346e-5


def test_figures_of_steps_come_before_others():
    steps_, others = (
        {"a": {10.0: Figure(1.0), 100.0: Figure(2.0)}},
        {"a": {4.0: Figure(7.0), 50.0: Figure(8.0), 500.0: Figure(9.0)}, "b": {1.0: Figure(3.0)}},
    )
    assert case_timer.join_curves(steps_, others, outside=True) == {
        "a": {10.0: Figure(1.0), 100.0: Figure(2.0), 4.0: Figure(7.0), 500.0: Figure(9.0)},
        "b": {1.0: Figure(3.0)},
    }
    assert case_timer.join_curves({"a": {1: Figure(1.0)}}, {"a": {1: Figure(2.0), 2: Figure(3.0)}}) == {
        "a": {1: Figure(1.0), 2: Figure(3.0)}
    }


def test_layouts_stay_apart_where_they_were_measured():
    some = {(1, i, 1, 1): Figure(1.0) for i in range(1, 9)}
    found = {
        "bfloat16": some,
        "bfloat16/tn": {**some},
        "float32": some,
        "float32/nt": {(1, 1, 1, 1): Figure(3.0), (1, 99, 1, 1): Figure(5.0)},
    }
    tables = case_timer.products_of(found)
    assert set(tables) == {"bfloat16", "bfloat16/tn", "float32"} and len(tables["float32"]) == 9
    assert tables["float32"][0] == (1, 1, 1, 1, 2.0) and tables["float32"][-1] == (1, 99, 1, 1, 5.0)


# ---- parts of a machine
# ------------------------------------------------------------------------------------------------


def test_products_have_the_shapes_and_layouts_they_say(monkeypatch):
    made = []
    real = memory._operand
    monkeypatch.setattr(memory, "_operand", lambda *args: made.append(real(*args)) or made[-1])
    before = memory.fp32_matmul()
    found = memory.measure_products(0.01, grid=[(1, 8, 16, 32), (3, 8, 16, 32)])
    assert {"bfloat16", "bfloat16/nt", "bfloat16/tn", "float32", "float64", "float16"} <= set(
        found
    ) and memory.fp32_matmul() == before
    assert set(found["bfloat16/tn"]) == {(1, 8, 16, 32), (3, 8, 16, 32)} and all(
        f.s > 0 for each in found.values() for f in each.values()
    )
    for a, b in zip(made[::2], made[1::2]):
        assert a.shape[-2:] == (8, 32) and b.shape[-2:] == (32, 16) and a.dtype == b.dtype
    assert [step_operators.layout(pair) for pair in zip(made[::2], made[1::2])][:6] == ["", "/nt", "/tn"] * 2


@pytest.mark.parametrize(("most_s", "measured"), [(60.0, 2), (1e-7, 1)])
def test_products_that_take_too_long_are_left_out(monkeypatch, most_s, measured):
    monkeypatch.setattr(memory, "MOST_S", most_s)
    found = memory.measure_products(0.0, grid=[(1, 2, 2, 2), (1, 96, 96, 96)])
    assert {dtype: len(found[dtype]) for dtype in ("bfloat16", "float32")} == {
        "bfloat16": measured,
        "float32": measured,
    }


def test_the_grid_covers_training():
    grid = memory.shapes(False)
    assert (
        len(set(grid)) == len(grid) > len(memory.shapes(True))
        and (1, 2048, 704, 256) in grid
        and (1, 256, 704, 2048) in grid
    )
    assert any(batch > 1 for batch, *_ in grid) and all(len(shape) == 4 for shape in grid)


def test_memory_is_measured_by_bytes_moved(short):
    found = memory.measure_memory(0.01)
    assert set(found["add"]) == {3.0 * 4096, 3.0 * 16384} and set(found["aten.exp/bfloat16"]) == {
        2.0 * size for size in memory.FEW
    }
    # To bfloat16 from float32: 4 bytes read and 2 written for each element.
    assert set(found["aten._to_copy/bfloat16"]) == {1.5 * size for size in memory.FEW}
    assert set(found["aten._to_copy/float32"]) == {3.0 * size for size in memory.FEW} and "fresh" in found


def test_a_step_is_recorded_operator_by_operator():
    found = step_operators.record(0.0, ladder=[step_operators.Sizes("llama", 64, 1, 128, 1)], precisions=["bf16"])
    assert {"aten.mul/bfloat16", "pointwise/bfloat16", "optimizer/float32", "copy/bfloat16"} <= set(found.kernels)
    # The MLP's products: forward [128, 64] by [64, 176], and the weights' gradient, whose first operand is a transpose.
    assert (1, 128, 176, 64) in found.gemm["bfloat16"] and any(
        (1, 64, 176, 128) in found.gemm.get(f"bfloat16{tn}", {}) for tn in ("/tn", "/nt")
    )
    (step,) = found.steps
    assert step.ops > 100 and 0 < step.ops_s < 10 * step.s


def rates_of_attention(sizes, dtype):
    """Record a step in this dtype: (the rates of its operators, the form that served its attention)."""
    found = step_operators.record(0.0, ladder=[sizes], precisions=["bf16" if dtype == "bfloat16" else "fp32"])
    q = torch.empty(sizes.batch, sizes.seq_len, 1, 64, dtype=getattr(torch, dtype))
    return found, registry.explain("attention", q, q, q).chosen


@pytest.mark.parametrize("small_products", (True, False))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_attention_is_recorded_whichever_form_serves(dtype, small_products, monkeypatch):
    """The C++ one as an operator of its own, the one by blocks by its products, of scores in float32 and of values in
    the heads' dtype, and what lies between them."""
    if not small_products:
        monkeypatch.setattr(attention_tiled, "has_small_products", lambda dtype: False)
    found, form = rates_of_attention(step_operators.Sizes("llama", 64, 1, 128, 1), dtype)
    own = {f"attention/{dtype}", f"fzero.tiled_forward/{dtype}", f"fzero.tiled_backward/{dtype}"}
    if form == "tiled":
        assert small_products and own <= set(found.kernels)
    else:
        products = {
            key: {shape for kind in ("", "/tn", "/nt") for shape in found.gemm.get(f"{key}{kind}", ())}
            for key in ("float32", dtype)
        }
        assert form == "blocked" and not own & set(found.kernels)
        assert (1, 128, 128, 64) in products["float32"] and (1, 128, 64, 128) in products[dtype]
        assert {"aten.exp/float32", "aten.masked_fill/float32", "aten.amax/float32"} <= set(found.kernels)


@pytest.mark.parametrize("small_products", (True, False))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_long_sequences_have_a_rate_of_attention_on_every_cpu(dtype, small_products, monkeypatch):
    """Also where torch has no small products in bfloat16 (AVX2 alone) or in neither dtype: its own attention takes over
    from the blocks."""
    if not small_products:
        monkeypatch.setattr(attention_tiled, "has_small_products", lambda dtype: False)
    assert step_operators.LONG in step_operators.LADDER and step_operators.LONG in step_operators.QUICK
    found, form = rates_of_attention(step_operators.LONG, dtype)
    names = {"tiled": "fzero.tiled_{}", "fused": "aten._scaled_dot_product_flash_attention_for_cpu{}"}
    passes = ("forward", "backward") if form == "tiled" else ("", "_backward")
    assert small_products or form == "fused"
    keys = [f"{names[form].format(each)}/{dtype}" for each in passes]
    assert {f"attention/{dtype}", *keys} <= set(found.kernels)
    assert all(s.s > 0 and flop > 1e8 for key in keys for flop, s in found.kernels[key].items())


def test_what_the_host_takes_of_a_step():
    found = [step_operators.Step(1.0, 0.8, 100), step_operators.Step(2.0, 1.0, 100), step_operators.Step(9.0, 1.0, 100)]
    assert step_operators.host_of(found, 0.001) == pytest.approx(0.01 + 0.001)
    assert step_operators.host_of([step_operators.Step(1.0, 2.0, 100)], 0.0) == 1e-7


def test_the_overhead_of_uncompiled_steps():
    found = step_operators.measure_overhead(0.05, compiled=False)
    assert set(found.op_s) == set(found.step_s) == {"eager"} and 1e-7 <= found.op_s["eager"] < 1e-2


def test_transposes_are_seen():
    x, w = torch.ones(4, 8), torch.ones(8, 6)
    assert (
        step_operators.layout((x, w)) == ""
        and step_operators.layout((x.T.contiguous().T, w)) == "/tn"
        and step_operators.layout((x, torch.ones(6, 8).T)) == "/nt"
    )
    assert step_operators.layout((torch.ones(4, 6), x, torch.ones(6, 8).T)) == "/nt"  # addmm


def fifth(mesh, size):
    return processes.messages(mesh, 0.01, sizes=(1 << 10, size))


@pytest.mark.slow
def test_messages_between_ranks():
    found = pools.run(2, fifth, 1 << 14)
    both = processes.slowest(found)
    assert set(both.curves) == set(processes.COLLECTIVES) and all(
        set(sizes) == {1 << 10, 1 << 14} for sizes in both.curves.values()
    )
    for kind, sizes in both.curves.items():
        assert all(sizes[size] == max(each.curves[kind][size] for each in found) > 0 for size in sizes)
    assert 0 <= both.hidden <= 1 and both.call_s > 0


def test_latency_and_rate_of_messages():
    assert processes.fit({1e3: 1e-4 + 1e-6, 1e6: 1e-4 + 1e-3}) == (pytest.approx(1.01e-4), pytest.approx(1e9, rel=1e-3))
    flat = {kind: {1e3: 1e-4, 1e6: 1.1e-3} for kind in processes.COLLECTIVES}
    level = machine.link_of(
        {2: processes.MessageTimes(flat, 4e-5, 0.5), 4: processes.MessageTimes(flat, 9e-5, 0.1)}, "cpu"
    )
    assert (level.kind, level.ranks, level.hidden, level.call_s) == ("gloo", None, 0.5, 4e-5)
    assert level.latency_s == pytest.approx(6e-5) and level.bytes_s == pytest.approx(1e9, rel=1e-2)
    assert level.total_bytes_s == pytest.approx(1e6 * 3 / 1.1e-3)


def test_figures_of_several_processes_are_means():
    a, b = {"x": {1: Figure(1.0, 1.0, 1.0), 2: Figure(5.0)}}, {"x": {1: Figure(3.0, 2.0, 0.5)}}
    assert (
        processes.merge_ranks([a, b])["x"][1] == Figure(2.0, 2.0, 0.5)
        and processes.merge_ranks([a, b])["x"][2].s == 5.0
    )


def failing(mesh):
    raise RuntimeError(f"not on {mesh.size}")


@pytest.mark.exhaustive
def test_a_process_that_fails_is_named():
    with pytest.raises(ValueError, match="process 0 of 1 of the measurement failed: RuntimeError: not on 1"):
        processes.on_ranks(1, failing)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_fused_loops_are_compiled_once_for_all_sizes():
    found = memory.measure_fused(0.1)
    assert set(found) == {"fused/float32", "fused/bfloat16"} and all(
        len(sizes) == len(memory.ROWS) for sizes in found.values()
    )


def test_a_machine_is_put_together(short, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 1)
    found = machine.measure(machine.Effort(("memory", "gemm", "steps"), quick=True))
    assert (
        found.measured
        and devices.from_json(devices.to_json(found), "") == found
        and found.machine["parts"] == "memory, gemm, steps (quick)"
    )
    (rates,) = found.rates
    assert (rates.threads, rates.processes) == (1, 1) and rates.op_s["eager"] > 0 and rates.bandwidth[0][0] == 3 * 4096
    assert "pointwise/bfloat16" in rates.kernels and (1, 8, 8, 8) in {row[:4] for row in rates.gemm["float32"]}
    products = [row for key, rows in rates.gemm.items() if key.partition("/")[0] == "float32" for row in rows]
    assert found.flops["float32"] == max(2 * b * m * n * k / s for b, m, n, k, s in products) and found.links == (
        machine.UNKNOWN,
    )
    assert all(s > 0 and math.isfinite(s) for curve in rates.kernels.values() for _, s in curve)


def test_parts_that_are_not_measured_stay(short, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 1)
    found = machine.measure(machine.Effort(("memory",), quick=True), previous=HERE)
    assert found.links == HERE.links and found.collectives == HERE.collectives and found.rates[1:] == HERE.rates[1:]
    assert (
        found.rates[0].gemm == RATES.gemm
        and found.rates[0].op_s == RATES.op_s
        and found.rates[0].bandwidth != RATES.bandwidth
    )
    assert "norm/float32" in found.rates[0].kernels and "aten.mul/float32" in found.rates[0].kernels


def test_which_processes_are_started():
    assert machine._rank_counts(machine.Effort(), 2) == [2, 4] and machine._rank_counts(machine.Effort(), 6) == [
        2,
        4,
        6,
    ]
    assert (
        machine._rank_counts(machine.Effort(("gemm",)), 2) == [2]
        and machine._rank_counts(machine.Effort(("gemm",), quick=True), 2) == []
    )
    assert machine._rank_counts(machine.Effort(quick=True), 2) == [2] and machine._rank_counts(
        machine.Effort(("links",)), 1
    ) == [2, 4]
    assert machine._rank_counts(machine.Effort(("gemm",)), 64) == []


def test_the_disk_is_measured_and_nothing_stays(disk_path, monkeypatch):
    from fzero.offload import disk_io, serves_direct
    from fzero.planner.calibrate import disk

    if disk_io.file_system(disk_io.mount_point(disk_path)) in disk.MEMORY or not serves_direct(disk_path):
        pytest.skip("the folder of this test is not on a disk that takes direct transfers")
    monkeypatch.setattr(machine, "DISK_BYTES", 1 << 20)
    found = machine.disk_rates(disk_path, quick=True)
    assert (
        set(found) == {"read", "write", "both"}
        and all(1e6 < rate < 1e12 for rate in found.values())
        and list(disk_path.iterdir()) == []
    )


# ---- the command
# -------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_device_file(fz, short):
    code, out, err = fz("bench", "--quick", "--only", "gemm")
    assert (code, err) == (0, "") and out.endswith(f"written to {device_file()}\n") and "products, float32:" in out
    first = devices.device("here")
    assert first.rates[0].gemm and not first.rates[0].op_s and first.nvme == {}
    code, out, _ = fz("bench", "--quick", "--only", "memory", "--json")
    assert (
        code == 0
        and devices.from_json(out, "") == devices.device("here")
        and devices.device("here").rates[0].gemm == first.rates[0].gemm
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ["--only", "gem"],
            "there is no part 'gem' of a machine to measure; the parts are memory, gemm, steps, fused, links, "
            "attention",
        ),
        (["--out", "here.txt"], "--out is 'here.txt'; a device file is a .json file"),
        (["--device", "tpu"], "--device is 'tpu'; it must be auto, cpu or cuda"),
    ],
)
def test_mistakes_are_one_line(fz, args, said):
    code, out, err = fz("bench", *args)
    assert code == 2 and out == "" and err == f"fzero: error: {said}\n" and not device_file().exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(fz):
    assert (
        fz("bench", "--device", "cuda")[2]
        == "fzero: error: device is cuda and PyTorch finds no GPU here; use device=cpu (--device cpu), or a CUDA build "
        "of PyTorch\n"
    )


def test_a_file_of_another_device_is_not_mixed(fz, tmp_path):
    machine.save(devices.device("h100"), tmp_path / "h100.json")
    assert (
        "is of a cuda device and --device is cpu; give another --out"
        in fz("bench", "--only", "gemm", "--out", tmp_path / "h100.json")[2]
    )


def test_help_names_options_and_the_disk_command(fz):
    code, out, _ = fz("bench", "--help")
    assert code == 0 and all(word in out for word in ("--quick", "--only", "--out", "--disk", "--device", "disk "))
