"""What "auto" becomes on a machine, and that asking for what is not there is refused."""

import pytest
import torch

from fzero.run import machine
from fzero.run.config_table import from_table


@pytest.fixture(autouse=True)
def switch():
    yield
    machine.set_fp32_matmul("default")


def settle(monkeypatch, table, *, fp32=1e9, bf16=1e9, onednn=1e9, error=1e-7, compiler="g++"):
    """The settled config on a machine of these rates (FLOP/s)."""

    def rates(kinds, threads=1, seconds=0.2):
        known = {(torch.bfloat16, "default"): bf16, (torch.float32, "default"): fp32, (torch.float32, "onednn"): onednn}
        return [known[kind] for kind in kinds]

    monkeypatch.setattr(machine, "gemm_rates", rates)
    monkeypatch.setattr(machine, "fp32_error", lambda: error)
    monkeypatch.setattr(machine, "compiler", lambda: compiler)
    config, lines = machine.settle(from_table(table))
    assert torch.backends.mkldnn.matmul.fp32_precision == ("bf16" if config.precision.fp32_matmul == "onednn" else "none")
    return config.precision.policy, config.precision.fp32_matmul, config.train.compiled, " ".join(lines)


def precision(**values):
    return {"preset": "mlp-tiny", "precision": values}


def test_auto_goes_by_measurement(monkeypatch):
    assert settle(monkeypatch, precision(), bf16=2e9)[:3] == ("bf16", "default", True)
    assert settle(monkeypatch, precision(), bf16=5e8)[:3] == ("fp32", "default", True)
    assert settle(monkeypatch, precision(), bf16=5e8, onednn=2e9)[:3] == ("fp32", "onednn", True)
    assert settle(monkeypatch, precision(), bf16=5e8, onednn=2e9, error=1e-5)[:3] == ("fp32", "default", True)
    assert settle(monkeypatch, precision(), bf16=5e8, onednn=1.01e9)[:3] == ("fp32", "default", True)
    assert "bf16 2, fp32 1 GFLOP/s" in settle(monkeypatch, precision(), bf16=2e9)[3]
    *_, compiled, said = settle(monkeypatch, precision(), compiler="")
    assert compiled is False and "no C++ compiler" in said


def test_what_is_asked_for_is_what_one_gets(monkeypatch):
    assert settle(monkeypatch, precision(policy="fp32", fp32_matmul="default"), bf16=9e9, onednn=9e9)[:2] == ("fp32", "default")
    assert settle(monkeypatch, precision(policy="bf16", fp32_matmul="onednn"), onednn=1e8)[:2] == ("bf16", "onednn")
    with pytest.raises(ValueError, match=r"error here is 1\.0e-05, above 1e-06"):
        settle(monkeypatch, precision(fp32_matmul="onednn"), error=1e-5)
    with pytest.raises(ValueError, match=r"train\.compiled is true and no C"):
        settle(monkeypatch, {"preset": "mlp-tiny", "train": {"compiled": True}}, compiler="")
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        with pytest.raises(ValueError, match="has no such switch here; use default"):
            settle(patch, precision(fp32_matmul="onednn"))
        assert settle(patch, precision(policy="fp32"), onednn=9e9)[1] == "default"


def test_the_form_of_each_operation_is_found_without_computing():
    config = from_table({"precision": {"policy": "bf16"}})
    assert {"attention", "add_rms_norm", "rms_norm", "rope_qk", "swiglu", "linear_cross_entropy"} <= set(machine.forms(config))
    off = machine.forms(from_table({"precision": {"policy": "bf16"}, "train": {"kernels": "reference"}}))
    assert set().union(*off.values()) == {"reference"} != set().union(*machine.forms(config).values())


def test_the_probe_sees_an_inexact_product():
    assert 1e-8 < machine.fp32_error() < machine.MAX_ERROR


def test_rates_and_memory_are_plausible():
    machine.set_fp32_matmul("onednn")
    for rate in machine.gemm_rates([(torch.float32, "default"), (torch.bfloat16, "default"), (torch.float16, "default")], 1, 0.02):
        assert 1e7 < rate < 1e15
    assert machine.fp32_matmul() == "onednn"  # as it was
    assert 1e7 < machine.available_bytes() < 1e15
    assert 1 <= machine.cores() <= 4096
