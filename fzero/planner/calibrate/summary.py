"""A device in a few lines, as `fzero bench` prints them."""

from __future__ import annotations

from fzero.planner.devices import Curve, Device, Rates
from fzero.run.memory_check import gigabytes

SHOWN = ("fused/float32", "norm/float32", "attention/float32", "cross_entropy/float32", "optimizer/float32")


def describe(device: Device) -> str:
    """Format the measured products, memory, operators, links, and how steady the measurement was."""
    units = "cores" if device.kind == "cpu" else "multiprocessors"
    lines = [f"{device.name}: {device.processors} {units}, {gigabytes(device.memory_bytes)}"]
    for rates in device.rates:
        several = f", each of {rates.processes} processes at once" if rates.processes > 1 else ""
        lines.append(f"{rates.threads} thread{'s' * (rates.threads > 1)}{several}:")
        lines += [f"  {line}" for line in _of(rates)]
    for level in device.links:
        hidden = "" if level.hidden is None else f", {level.hidden:.0%} of it hidden behind computation"
        lines.append(
            f"links, {level.name}: {level.bytes_s / 1e9:.2f} GB/s and {level.latency_s * 1e6:.0f} us a message{hidden}"
        )
    for kind, rate in {**device.host, **device.nvme}.items():
        lines.append(f"{'host' if kind in device.host else 'disk'}, {kind}: {rate / 1e9:.2f} GB/s")
    return "\n".join([*lines, f"spread: {device.machine.get('spread', 'not known')}"])


def _of(rates: Rates) -> list[str]:
    lines = []
    for key, rows in rates.gemm.items():
        best = max(rows, key=lambda row: row[0] * row[1] * row[2] * row[3] / row[4])
        b, m, n, k, seconds = best
        lines.append(
            f"products, {key}: {2 * b * m * n * k / seconds / 1e9:,.0f} GFLOP/s at best, of {len(rows)} shapes"
        )
    for key, curve in (
        ("sum of two", rates.bandwidth),
        *((key, rates.kernels[key]) for key in SHOWN if key in rates.kernels),
    ):
        lines.append(f"{key}: {_ends(curve)} {'GFLOP/s' if key.startswith('attention') else 'GB/s'}, small to large")
    return lines + [f"host, {key}: {seconds * 1e6:.1f} us" for key, seconds in rates.op_s.items()]


def _ends(curve: Curve) -> str:
    picked = [curve[i] for i in sorted({0, len(curve) // 2, len(curve) - 1})]
    return ", ".join(f"{size / seconds / 1e9:.1f}" for size, seconds in picked)
