"""Parameter groups: dicts with the fields of a rule, in which other libraries' names for several of them work, too."""

from collections.abc import Mapping
from typing import Any

from arrayopt.foreign import spread
from arrayopt.params.groups import fields_of
from arrayopt.rules.base import Rule

__all__ = ["Settings"]


class Settings(dict[str, Any]):
    """A dict of a rule's fields and whatever else there is to say of some parameters.

    ``betas`` is ``beta1`` and ``beta2`` at once, to read and to write, where the rule has these; so is ``eps`` where
    the rule has several. They are not kept under these names.
    """

    def __init__(self, rule: type[Rule], given: Mapping[str, Any]) -> None:
        super().__init__()
        self._fields = fields_of(rule)
        self.update(given)

    def __setitem__(self, name: str, value: Any) -> None:
        every = spread(self._fields, name)
        parts = next((x for x in every if isinstance(value, tuple | list) and len(x) == len(value)), None)
        if parts is not None:
            super().update(zip(parts, value, strict=True))
        elif every:
            meant = " or ".join(f"({', '.join(x)})" for x in every)
            raise ValueError(f"param_groups: `{name}` must be {meant}; got {value!r}")
        else:
            super().__setitem__(name, value)

    def __missing__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return tuple(self[part] for part in spread(self._fields, name)[0])

    def __contains__(self, name: object) -> bool:
        meant = spread(self._fields, str(name))[:1]
        return super().__contains__(name) or any(self.keys() >= set(parts) for parts in meant)

    def get(self, name: str, default: Any = None) -> Any:
        """See `dict.get`."""
        return self[name] if name in self else default  # noqa: SIM401 - it is that

    def setdefault(self, name: str, default: Any = None) -> Any:
        """See `dict.setdefault`."""
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *given: Any, **named: Any) -> None:
        """See `dict.update`."""
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
