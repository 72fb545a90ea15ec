"""The losses of a mixture's sources in a row of metrics."""

from __future__ import annotations

from fzero.data.mixture import Mixture
from fzero.models.by_source import KINDS
from fzero.run.config import RunConfig


def losses_by_source(config: RunConfig, sums: dict[str, float], name: str = "loss") -> dict[str, dict[str, float]]:
    """{"loss_by_source": {source: nats a token of it}} of the sums of `models.by_source`, or of what is in proportion
    to them, which are removed from `sums`; {} where there are none. A source without a token that counts is left out.

    >>> from fzero.run.config import Data
    >>> config = RunConfig(data=Data(mixture="web:1,code:1"))
    >>> losses_by_source(config, {"source_loss/0": 6.0, "source_tokens/0": 2.0, "source_tokens/1": 0.0})
    {'loss_by_source': {'web': 3.0}}
    """
    found, names = {}, Mixture.parse(config.data.mixture).names if config.data.mixture else ()
    for i, source in enumerate(names):
        loss, tokens = (sums.pop(f"{kind}/{i}", 0.0) for kind in KINDS)
        if tokens:
            found[source] = loss / tokens
    return {f"{name}_by_source": found} if found else {}
