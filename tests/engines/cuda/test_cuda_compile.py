"""Every kernel, compiled for real devices: its registers, and the bytes that it spills."""

import itertools
import re

import pytest

import arrayopt as ao
from arrayopt.engines.base import Criteria
from arrayopt.engines.cplusplus import header
from arrayopt.engines.cuda.emit import emit
from arrayopt.engines.cuda.emit_judge import emit_judge
from arrayopt.fusion.plans import plan_for
from tests.cudacpu import nvrtc
from tests.support.cases import CASES, MATRICES, make
from tests.support.ringed import ringed
from tests.support.slow import marked
from tests.support.tracing import made

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
OLDEST, NEWEST = ARCHS[0], ARCHS[-1]
DTYPES = ("float32", "float16", "bfloat16", "float64", "complex64", "complex128")
BUDGET = {"LAMB": 80, "LANS": 128, "AdamW": 80}
"""Registers of a thread: with 80, a multiprocessor has three blocks of 256 threads at once; with 128, two.

LANS has four loads, two stores and six sums in one pass.
"""

OF_MATRICES = ("CAME", "Adafactor")
"""Rules with sums over rows and columns, which have other kernels for matrices."""

WIDER = ("float16", "bfloat16")
"""Dtypes of which rounding needs more registers than a thread has with three blocks."""

SPILLED = {"LANS": 16, "Adan": 72, "AdEMAMix": 32, "AdamH": 16, "CAME": 16}
"""The bytes that a thread spills on some architectures with three blocks; with two, none. CAME is faster with three, as
measured on an H200."""

OPTIONS = (*nvrtc.CUPY_OPTIONS, "--ptxas-options=-v")


def kernels():
    """Each rule in each dtype, with both forms of `OF_MATRICES`."""
    for name, rows in CASES.items():
        rule = make(name, rows[0])
        for dtype in DTYPES:
            if dtype.startswith("complex") and not rule.complex_ok:
                continue
            yield from ((name, dtype, rank) for rank in ((1, 2) if name in OF_MATRICES else (1,)))
    yield from (("CAME", "float32", 4), ("Adafactor", "float32", 4))


def compiled():
    """The cases: kernels with the architectures for which they are compiled."""
    for name, dtype, rank in kernels():
        matrices = rank > 1  # long to compile: in other dtypes for the oldest and the newest alone
        archs = ARCHS if not matrices or (dtype, rank) == ("float32", 2) else (OLDEST, NEWEST)
        yield from ((name, dtype, rank, arch) for arch in archs)


def each_run(name, dtype, rank, arch):
    """Whether `make test` compiles a case: all rules in float32, LAMB in each dtype, only LAMB for the oldest."""
    if arch == OLDEST:
        return (name, dtype) == ("LAMB", "float32")
    return arch == NEWEST and rank <= 2 and (dtype == "float32" or name == "LAMB")


@pytest.mark.parametrize("name", CASES)
def test_which_rules_have_kernels_of_their_own_for_matrices(name):
    of_matrices = plan_for(make(name, CASES[name][0]), 4, "float32", lean=True).element != "C"
    assert of_matrices == (name in OF_MATRICES)


@pytest.mark.parametrize(("name", "dtype", "rank", "arch"), marked(compiled(), each_run))
def test_every_kernel_compiles(name, dtype, rank, arch):
    text = ao.source(make(name, CASES[name][0]), engine="cupy", dtype=dtype, rank=rank)
    code, _, log = nvrtc.compile(text, arch=arch, options=OPTIONS)
    assert code
    assert "error" not in log
    used = nvrtc.usage(log)
    assert used.keys() == {"prepare", "run"}
    if name in BUDGET and dtype in ("float32", "float16", "bfloat16"):
        assert used["run"].registers <= (128 if dtype in WIDER else BUDGET[name])
    assert used["run"].spill_stores <= SPILLED.get(name, 0)
    assert used["run"].shared <= 48 << 10


FORMS = {"wide": (30, 40), "tall": (40, 30), "batch": (3, 30, 40)}
PRODUCTS = [(n, f, d, a) for n in MATRICES for f in FORMS for d in ("float32", "bfloat16", "float64") for a in ARCHS]
PRODUCTS = [x for x in PRODUCTS if x[1] == "wide" or (x[2] == "float32" and x[3] in (OLDEST, NEWEST))]


@pytest.mark.parametrize(
    ("name", "form", "dtype", "arch"),
    marked(PRODUCTS, lambda *case: case == ("Muon", "wide", "float32", NEWEST)),
)
def test_what_comes_between_products_compiles(name, form, dtype, arch):
    shape = FORMS[form]
    plan = plan_for(make(name, {"lr": 0.1, "matrix": "last"}), len(shape), dtype, shape=shape, lean=True)
    _, _, log = nvrtc.compile(emit(plan, dtype), arch=arch, options=OPTIONS)
    used = nvrtc.usage(log)["run"]
    assert used.spill_stores == used.spill_loads == 0


@pytest.mark.parametrize(
    ("name", "arch"),
    marked(itertools.product(MATRICES, ARCHS), lambda *case: case == ("Muon", NEWEST)),
)
def test_arithmetic_in_bfloat16_compiles(name, arch):
    rule = make(name, {"lr": 0.1, "ns_steps": 2, "ns_dtype": "bfloat16"})
    text = emit(plan_for(rule, 2, "float32", shape=(30, 40), lean=True), "float32")
    assert "to_bfloat16(" in text
    used = nvrtc.usage(nvrtc.compile(text, arch=arch, options=OPTIONS)[2])["run"]
    assert used.spill_stores == used.spill_loads == 0


@pytest.mark.parametrize(
    "scaling", [None, ao.LossScale(), ao.LossScale(dynamic=False)], ids=["none", "dynamic", "static"]
)
@pytest.mark.parametrize("scale", [None, "scale", "given_scale"])
@pytest.mark.parametrize("arch", marked(((arch,) for arch in ARCHS), lambda arch: arch == NEWEST))
def test_the_judge_compiles(scaling, scale, arch):
    for limit in (False, True):
        text = emit_judge(Criteria(scaling, scale, limit, scaling is not None))
        _, _, log = nvrtc.compile(text, arch=arch, options=OPTIONS)
        used = nvrtc.usage(log)["judge"]
        assert used.spill_stores == used.spill_loads == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_totals_compile(arch):
    _, _, log = nvrtc.compile(header("totals.cuh"), arch=arch, options=OPTIONS)
    assert all(x.spill_stores == x.spill_loads == 0 for x in nvrtc.usage(log).values())
    assert set(nvrtc.usage(log)) == {"total_sum", "total_max"}


AROUND = {"ema_decay": 0.99, "lookahead_steps": 5, "clip_unit_ratio": 0.1, "clip_tensor_norm": 1.0, "clip_value": 1.0}
WHOLE = {
    "LAMB": ao.LAMB(**AROUND, state_dtype="bfloat16"),
    "CAME": ao.CAME(lr=0.1, **AROUND, grad_centralization=True),
    "AdamW": ao.AdamW(state_dtype="int8", master_weights="split"),
}


@pytest.mark.parametrize(
    ("name", "rank"),
    marked(
        ((name, rank) for name in WHOLE for rank in (1, 4)),
        lambda name, rank: (name, rank) in (("LAMB", 1), ("AdamW", 1)),
    ),
)
def test_all_that_a_rule_can_have_around_it_compiles(name, rank):
    nvrtc.compile(ao.source(WHOLE[name], engine="cupy", dtype="float16", rank=rank), arch="sm_90")


BY_CHANCE = [(name, dtype, arch) for name in ("AdamW", "LAMB") for dtype in ("float16", "bfloat16") for arch in ARCHS]


@pytest.mark.parametrize(
    ("name", "dtype", "arch"), marked(BY_CHANCE, lambda *case: case == ("AdamW", "bfloat16", NEWEST))
)
def test_random_numbers_take_no_more_registers_than_there_are(name, dtype, arch):
    text = ao.source(getattr(ao, name)(lr=0.1, rounding="stochastic"), engine="cupy", dtype=dtype, rank=1)
    used = nvrtc.usage(nvrtc.compile(text, arch=arch, options=OPTIONS)[2])["run"]
    assert used.registers <= (BUDGET[name] if dtype == "float32" else 128)
    assert used.spill_stores == used.spill_loads == 0


def apart(k):
    """A rule whose tensors are separate problems, so that its numbers are computed between the passes."""
    return ao.LBFGS(memory=k, line_search=None, joint=False)


RINGS = {"ring": lambda k: ringed(k)(), "LBFGS": lambda k: ao.LBFGS(memory=k), "LBFGS, apart": apart}
HEAVY = [("ring", "complex64"), ("ring", "complex128"), ("LBFGS", "complex64"), ("ring, int8", "float32")]
HEAVY += [("LBFGS, int8", "float32"), ("LBFGS, int8", "bfloat16")]
HEAVY += [("ring, int8", "complex64"), ("LBFGS, int8", "complex64")]
RINGS |= {"ring, int8": lambda k: ringed(k)(state_dtype="int8")}
RINGS |= {"LBFGS, int8": lambda k: ao.LBFGS(memory=k, state_dtype="int8")}
LITTLE = {("LBFGS", "bfloat16"): 28}
PLAIN = [(rule, dtype) for rule in ("ring", "LBFGS", "LBFGS, apart") for dtype in ("float32", "bfloat16", "float64")]
WIDE = "float64", "complex128"
REGISTERS = [(rule, k, dtype, arch) for rule, dtype in PLAIN for k in (3, 5, 10) for arch in ARCHS]
REGISTERS += [(rule, k, dtype, arch) for rule, dtype in HEAVY for k in (3, 5, 10, 20) for arch in (OLDEST, NEWEST)]
EACH_RUN = [("ring", 10, "float32", NEWEST), ("LBFGS", 5, "float32", "sm_90"), ("ring, int8", 5, "float32", NEWEST)]
EACH_RUN += [("ring, int8", 3, "complex64", NEWEST)]


@pytest.mark.parametrize(
    ("kind", "k", "dtype", "arch"),
    marked(REGISTERS, lambda *case: case in EACH_RUN),
)
def test_registers_do_not_grow_with_the_members_of_rings(kind, k, dtype, arch):
    """Nor does a thread spill bytes, except a few if members are in 8 bits or complex."""
    text = ao.source(RINGS[kind](k), engine="cupy", dtype=dtype, rank=1)
    for source in re.split(r"(?m)^(?=// Fused kernels)", text)[1:]:  # one for each part between totals
        used = nvrtc.usage(nvrtc.compile(source, arch=arch, options=OPTIONS)[2])["run"]
        assert used.registers <= (255 if dtype in WIDE else 128)
        assert used.spill_stores <= (192 if (kind, dtype) in HEAVY else LITTLE.get((kind, dtype), 0))


def test_sources_name_nothing_outside():
    text = ao.source(ao.CAME(lr=0.1), engine="cupy", rank=4)
    assert "#include" not in text
    assert re.search(r"^// pass 0: load g; store -; reduce per row, per column; 4 B$", text, re.MULTILINE)


@pytest.mark.parametrize("rank", marked([(2,), (3,)], lambda rank: rank == 2))
def test_centred_complex_gradients_compile(rank):
    """The mean of a row of complex numbers is passed on as two real numbers."""
    rule = ao.AdamW(lr=0.1, grad_centralization=True)
    for dtype in ("complex64", "complex128"):
        assert nvrtc.compile(ao.source(rule, engine="cupy", dtype=dtype, rank=rank), arch="sm_90")[0]


@pytest.mark.parametrize("dtype", marked([("float32",), ("float64",)], lambda dtype: dtype == "float32"))
@pytest.mark.parametrize("rank", marked([(2,), (4,)], lambda rank: rank == 4))
def test_every_reduction_compiles(rank, dtype):
    """Several kinds in one pass, over whole tensors, rows, columns and matrices, and reductions of reductions."""

    def update(xp, p, g, s, h):
        for axis in (None, -1, -2, (-2, -1)):
            there = {"axis": axis, "keepdims": True}
            p = p - xp.max(g, **there) + xp.sum(g, **there)
        return p - xp.min(xp.sum(g, axis=-1)), {}

    text = ao.source(made(update)(), engine="cupy", dtype=dtype, rank=rank)
    assert nvrtc.compile(text, arch="sm_90")[0]


OF_PARTS = {
    "CAME": ao.CAME(lr=0.1),
    "Adafactor": ao.Adafactor(),
    "AdamW": ao.AdamW(lr=0.1, grad_centralization=True, rounding="stochastic"),
}


@pytest.mark.parametrize(
    ("name", "rank", "arch"),
    marked(
        [(name, rank, arch) for name in OF_PARTS for rank in (2, 4) for arch in (OLDEST, "sm_90", NEWEST)],
        lambda *case: case == ("AdamW", 2, NEWEST),
    ),
)
def test_kernels_of_parts_of_matrices_compile(name, rank, arch):
    plan = plan_for(OF_PARTS[name], rank, "bfloat16", lean=True)
    text = emit(plan, "bfloat16", "float32", windows=True)
    used = nvrtc.usage(nvrtc.compile(text, arch=arch, options=OPTIONS)[2])["run"]
    assert used.spill_stores == used.spill_loads == 0
