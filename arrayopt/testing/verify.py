"""The comparison behind ``arrayopt verify``: run many rules on many backends, and collect a report."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

import arrayopt as ao
from arrayopt.arrays import REAL
from arrayopt.libraries import numpy_dtype
from arrayopt.rules.base import Rule
from arrayopt.testing.backends import Backend
from arrayopt.testing.equivalence import LIMITS, Difference, Outcome, compare
from arrayopt.testing.ulps import plain

Shape = tuple[int, ...]

RULES: dict[str, Rule] = {
    "LAMB": ao.LAMB(lr=0.01),
    "LANS": ao.LANS(lr=0.01),
    "CAME": ao.CAME(lr=0.01),
    "LARS": ao.LARS(lr=0.1, weight_decay=0.01),
    "AdamW": ao.AdamW(lr=0.01),
    "Adam": ao.Adam(lr=0.01),
    "SGD": ao.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adafactor": ao.Adafactor(),
    "Lion": ao.Lion(lr=0.01, weight_decay=0.01),
    "RMSprop": ao.RMSprop(momentum=0.9, centered=True),
    "NAdam": ao.NAdam(weight_decay=0.01),
    "RAdam": ao.RAdam(weight_decay=0.01),
    "Adan": ao.Adan(weight_decay=0.01),
    "AdaBelief": ao.AdaBelief(weight_decay=0.01, eps_root=1e-8),
    "Sophia": ao.Sophia(weight_decay=0.01),
    "Prodigy": ao.Prodigy(d0=1e-3, weight_decay=0.01),
    "AdEMAMix": ao.AdEMAMix(alpha_warmup=5.0, beta3_warmup=5.0),
    "ScheduleFreeAdamW": ao.ScheduleFreeAdamW(warmup_steps=5.0, weight_decay=0.01),
    "AdamH": ao.AdamH(),
    "FISTA": ao.FISTA(lr=0.1),
    # each Newton-Schulz step multiplies the rounding errors of small singular values by 3.4
    "Muon": ao.Muon(lr=0.01, ns_steps=3),
    "NorMuon": ao.NorMuon(lr=0.01, ns_steps=3),
    "MuonH": ao.MuonH(lr=0.01, ns_steps=3),
    # eigenvectors differ by rounding errors divided by gaps between eigenvalues; a small √v + eps would magnify them
    "SOAP": ao.SOAP(lr=1e-3, eps=1.0, precondition_frequency=3),
}
"""The rules by name, with hyper-parameters that make every part of a rule have an effect."""

STORED: dict[str, Rule] = {
    f"{name}-int8": replace(RULES[name], state_dtype="int8") for name in ("LAMB", "LANS", "CAME", "AdamW", "SGD")
}
"""Some of these rules with their state in 8 bits."""

SHAPES: tuple[Shape, ...] = ((64, 33), (5, 3, 3, 3), (1000,), (7,), ())


@dataclass(frozen=True)
class Settings:
    """The problem: shapes and dtypes of tensors, the number of steps, the seed of random values, and the limit."""

    shapes: Sequence[Shape] = SHAPES
    dtypes: Sequence[str] = ("float32", "float64")
    steps: int = 10
    seed: int = 0
    max_ulp: float | None = None

    def limit(self, dtype: str) -> float:
        """The largest difference that passes, in ULPs."""
        return LIMITS[dtype] if self.max_ulp is None else self.max_ulp


@dataclass(frozen=True)
class Row:
    """The outcomes of one rule in one dtype, by backend."""

    rule: str
    dtype: str
    limit: float
    outcomes: Mapping[str, Outcome]

    @property
    def passed(self) -> bool:
        """Whether no backend raised an error or differed by more than the limit."""
        return all(outcome.passes(self.limit) for outcome in self.outcomes.values())


@dataclass(frozen=True)
class Report:
    """The settings and outcomes of a run, with a row for each rule and dtype."""

    reference: str  # the backend with which the others were compared
    backends: list[str]  # the other backends
    versions: Mapping[str, str]  # of installed packages
    settings: Settings
    rows: list[Row] = field(default_factory=list)
    when: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))

    @property
    def passed(self) -> bool:
        """Whether every row passed."""
        return all(row.passed for row in self.rows)

    @property
    def differences(self) -> list[Difference]:
        """The differences of all backends that ran."""
        return [x.difference for row in self.rows for x in row.outcomes.values() if x.difference is not None]

    def to_json(self) -> str:
        """Return the report as JSON. Numbers that are not finite become the strings "inf", "-inf" and "nan"."""
        made = asdict(self) | {"passed": self.passed}
        for row, one in zip(self.rows, made["rows"], strict=True):
            one["passed"] = row.passed
        return json.dumps(plain(made), indent=1, allow_nan=False) + "\n"


def verify(
    rules: Mapping[str, Rule],
    backends: Iterable[Backend],
    settings: Settings,
    *,
    versions: Mapping[str, str],
    on_row: Callable[[Row], object] = lambda row: None,
) -> Report:
    """Compare rules on backends with NumPy's reference. `on_row` is called with each row when it is finished.

    A rule that does not support complex numbers has no rows for complex dtypes.
    """
    reference = "numpy:array_api"
    compared = [backend for backend in backends if backend.name != reference]
    report = Report(reference, [backend.name for backend in compared], dict(versions), settings)
    for name, rule in rules.items():
        for dtype in settings.dtypes:
            if dtype in REAL and not rule.complex_ok:
                continue
            params, grads_fn = _problem(rule, settings, dtype)
            outcomes = compare(rule, params, grads_fn, backends=compared, steps=settings.steps)
            outcomes = {backend.name: outcomes[backend.name] for backend in compared}
            report.rows.append(Row(name, dtype, settings.limit(dtype), outcomes))
            on_row(report.rows[-1])
    return report


def _problem(rule: Rule, settings: Settings, dtype: str) -> tuple[dict[str, Any], Callable[[Any, int], dict[str, Any]]]:
    """Return normal parameters, every third of them zero, and a function for normal gradients of several scales.

    Shapes that the rule refuses are left out, such as vectors for a rule that updates matrices only.
    """
    sizes = {"params": (1.0, 1.0, 0.0), "grads": (1.0, 0.1, 0.01, 0.001)}

    def draw(what: str, seed: Any) -> dict[str, Any]:
        rng, made = np.random.default_rng(seed), {}
        for i, shape in enumerate(settings.shapes):
            size = sizes[what][i % len(sizes[what])]
            values = rng.standard_normal(shape) * size
            imaginary = 1j * rng.standard_normal(shape) * size if dtype in REAL else 0.0
            name = f"{i}: {'x'.join(map(str, shape)) or 'scalar'}"
            made[name] = np.asarray(values + imaginary).astype(numpy_dtype(dtype))
        return made

    params = {name: p for name, p in draw("params", settings.seed).items() if not rule.refuses(np, p)}

    def grads_fn(now: Any, step: int) -> dict[str, Any]:
        return {name: g for name, g in draw("grads", (settings.seed, step)).items() if name in params}

    return params, grads_fn
