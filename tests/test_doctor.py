"""What "auto" becomes on a machine, and that asking for what is not there is refused."""

import json

import pytest
import torch

from fzero.run import from_table, machine
from fzero.run.measure import doctor


@pytest.fixture(autouse=True)
def switch():
    yield
    machine.set_fp32_matmul("default")


def resolve(monkeypatch, table, *, fp32=1e9, bf16=1e9, onednn=1e9, error=1e-7, compiler="g++"):
    """The resolved config on a machine of these rates (FLOP/s)."""

    def rates(kinds):
        known = {(torch.bfloat16, "default"): bf16, (torch.float32, "default"): fp32, (torch.float32, "onednn"): onednn}
        return [known[kind] for kind in kinds]

    monkeypatch.setattr(machine, "product_rates", rates)
    monkeypatch.setattr(machine, "fp32_error", lambda: error)
    monkeypatch.setattr(machine, "compiler", lambda: compiler)
    config, lines = machine.resolve_here(from_table(table))
    assert torch.backends.mkldnn.matmul.fp32_precision == (
        "bf16" if config.precision.fp32_matmul == "onednn" else "none"
    )
    return config.precision.policy, config.precision.fp32_matmul, config.train.compiled, " ".join(lines)


def precision(**values):
    return {"preset": "mlp-tiny", "precision": values}


def test_auto_goes_by_measurement(monkeypatch):
    assert resolve(monkeypatch, precision(), bf16=2e9)[:3] == ("bf16", "default", True)
    assert resolve(monkeypatch, precision(), bf16=5e8)[:3] == ("fp32", "default", True)
    assert resolve(monkeypatch, precision(), bf16=5e8, onednn=2e9)[:3] == ("fp32", "onednn", True)
    assert resolve(monkeypatch, precision(), bf16=5e8, onednn=2e9, error=1e-5)[:3] == ("fp32", "default", True)
    assert resolve(monkeypatch, precision(), bf16=5e8, onednn=1.01e9)[:3] == ("fp32", "default", True)
    assert "bf16 2, fp32 1 GFLOP/s" in resolve(monkeypatch, precision(), bf16=2e9)[3]
    *_, compiled, said = resolve(monkeypatch, precision(), compiler="")
    assert compiled is False and "no C++ compiler" in said


def test_what_is_asked_for_is_what_one_gets(monkeypatch):
    assert resolve(monkeypatch, precision(policy="fp32", fp32_matmul="default"), bf16=9e9, onednn=9e9)[:2] == (
        "fp32",
        "default",
    )
    assert resolve(monkeypatch, precision(policy="bf16", fp32_matmul="onednn"), onednn=1e8)[:2] == ("bf16", "onednn")
    with pytest.raises(ValueError, match=r"error here is 1\.0e-05, above 1e-06"):
        resolve(monkeypatch, precision(fp32_matmul="onednn"), error=1e-5)
    with pytest.raises(ValueError, match=r"train\.compiled is true and no C"):
        resolve(monkeypatch, {"preset": "mlp-tiny", "train": {"compiled": True}}, compiler="")
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        with pytest.raises(ValueError, match="has no such switch here; use default"):
            resolve(patch, precision(fp32_matmul="onednn"))
        assert resolve(patch, precision(policy="fp32"), onednn=9e9)[1] == "default"


def test_the_form_of_each_operation_is_found_without_computing():
    config = from_table({"precision": {"policy": "bf16"}})
    assert {"attention", "add_rms_norm", "rms_norm", "rope_qk", "swiglu", "linear_cross_entropy"} <= set(
        doctor.forms(config)
    )
    off = doctor.forms(from_table({"precision": {"policy": "bf16"}, "train": {"kernels": "reference"}}))
    assert set().union(*off.values()) == {"reference"} != set().union(*doctor.forms(config).values())


def test_the_probe_sees_an_inexact_product():
    assert 1e-8 < machine.fp32_error() < machine.MAX_ERROR


def test_rates_are_those_of_the_bench_and_are_measured_once_without_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    timed = []
    monkeypatch.setattr(machine, "_MEASURED", {})
    monkeypatch.setattr(machine, "gemm_rates", lambda kinds: timed.append(list(kinds)) or [1e9] * len(kinds))
    fp32, bf16 = (torch.float32, "default"), (torch.bfloat16, "default")
    threads = torch.get_num_threads()
    assert machine.product_rates([bf16, fp32]) == [1e9 * threads] * 2 == machine.product_rates([bf16, fp32])
    assert machine.peak_rate(torch.bfloat16, 4) == 1e9 * threads and timed == [[bf16, fp32]]

    def written(rates, **changes):
        table = {"kind": "cpu", "machine": {"processor": machine.processor()}, "rates": rates} | changes
        machine.device_file().parent.mkdir(exist_ok=True)
        machine.device_file().write_text(json.dumps(table))

    one = {
        "processes": 1,
        "gemm": {"float32": [[1, 100, 100, 100, 1e-3]], "float32/onednn": [[1, 10, 10, 10, 1e-6]], "bfloat16": []},
    }
    fast = {
        "processes": 1,
        "gemm": {"float32": [[1, 100, 100, 100, 5e-4], [1, 1, 1, 1, 1.0]], "bfloat16": [[2, 10, 10, 10, 1e-6]]},
    }
    written([one, fast, {"processes": 2, "gemm": {"float32": [[1, 100, 100, 100, 1e-9]]}}])
    assert machine.product_rates([fp32, (torch.float32, "onednn"), bf16]) == pytest.approx([4e9, 2e9, 4e9])
    assert machine.peak_rate(torch.float32, 4) == pytest.approx(1e9), "four processes share what one has alone"
    written([one, fast], machine={"processor": "another"})
    assert machine.product_rates([fp32]) == [1e9 * threads] and len(timed) == 1
    machine.device_file().write_text("{")
    with pytest.raises(ValueError, match=r"device.json: not JSON"):
        machine.product_rates([fp32])


def test_rates_and_memory_are_plausible():
    machine.set_fp32_matmul("onednn")
    for rate in machine.gemm_rates(
        [(torch.float32, "default"), (torch.bfloat16, "default"), (torch.float16, "default")], 0.02
    ):
        assert 1e7 < rate < 1e15
    assert machine.fp32_matmul() == "onednn"  # as it was
    assert 1e7 < machine.available_bytes() < 1e15
    assert 1 <= machine.cores() <= 4096
