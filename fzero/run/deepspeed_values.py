"""The values of a DeepSpeed config by their dotted names, read with their types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fzero.core.foreign import NAMES, nearest, short


class Values(NamedTuple):
    """The values, by name."""

    of: Mapping[str, Any]

    def read(self, name: str, kinds: tuple[type, ...], default: Any) -> Any:
        """The value, of one of these types; raises ValueError for another."""
        value = self.of.get(name, default)
        if value is not default and type(value) not in kinds:
            allowed = " or ".join(dict.fromkeys(NAMES[kind] for kind in kinds))
            raise ValueError(f"{name} is {short(value)}; it must be {allowed}")
        return value

    def number(self, name: str, default: Any = None) -> Any:
        """The value, a number."""
        return self.read(name, (float, int), default)

    def whole(self, name: str, default: Any = None) -> Any:
        """The value, a whole number (JSON's 1e3 is one)."""
        value = self.of.get(name, default)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return self.read(name, (int,), default)

    def flag(self, name: str, default: bool = False) -> bool:
        """The value, true or false, or DeepSpeed's "true" and "false"."""
        value = self.of.get(name)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        return self.read(name, (bool,), default)

    def choice(self, name: str, among: Sequence[str], default: str, others: Mapping[str, str] | None = None) -> str:
        """The value, one of `among`; raises ValueError, with the reason for one of `others`."""
        value = self.read(name, (str,), default)
        if value in among:
            return value
        if value in (others or {}):
            raise ValueError(f"{name} is {value!r}: {(others or {})[value]}")
        raise ValueError(f"{name} is {value!r}{nearest(value, among)}; it must be one of {', '.join(among)}")

    def below(self, where: str) -> Values:
        """The values within a table."""
        return Values(
            {name[len(where) + 1 :]: value for name, value in self.of.items() if name.startswith(f"{where}.")}
        )

    def expect_only(self, where: str, kind: str, names: Sequence[str]) -> None:
        """Raise ValueError for a name that this type of `where` does not have, with the nearest."""
        for name in self.of:
            if name not in names:
                raise ValueError(
                    f"there is no key '{where}.params.{name}'{nearest(name, names)} of {kind}; it has "
                    f"{', '.join(names)}"
                )
