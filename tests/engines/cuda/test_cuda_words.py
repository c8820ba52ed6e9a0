"""The small functions of the kernels on awkward values, compared with NumPy, or with Python's integers.

They are in one source, which is compiled once. Other tests run the code that uses them, with ordinary numbers.
"""

from itertools import product

import ml_dtypes
import numpy as np
import pytest

from arrayopt import randomness
from arrayopt.engines.cplusplus import header
from tests.cudacpu import Module
from tests.support.draws import WORD, block

HEADERS = ("storage", "packs", "arithmetic", "quantized", "codes", "random", "sums")
KERNEL = """
extern "C" __global__ void of_{name}({types}, {to}* to, int n) {{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {body}
}}
"""
WORDS = {
    "maximum": ("float a, float b", "float", "to[i] = maximum(a, b);"),
    "minimum": ("float a, float b", "float", "to[i] = minimum(a, b);"),
    "modulo": ("float a, float b", "float", "to[i] = modulo(a, b);"),
    "sign": ("float a", "float", "to[i] = sign(a);"),
    "finite": ("float a", "float", "to[i] = finite(a);"),
    "times": ("Complex a, Complex b", "Complex", "to[i] = a * b;"),
    "over": ("Complex a, Complex b", "Complex", "to[i] = a / b;"),
    "magnitude": ("Complex a", "float", "to[i] = magnitude(a);"),
    "conjugate": ("Complex a", "Complex", "to[i] = conjugate(a);"),
    "widen_half": ("Half a", "float", "to[i] = widen(a);"),
    "narrow_half": ("float a", "Half", "narrow(a, to[i]);"),
    "widen_bfloat16": ("BFloat16 a", "float", "to[i] = widen(a);"),
    "narrow_bfloat16": ("float a", "BFloat16", "narrow(a, to[i]);"),
    "joined_bfloat16": ("float a, float b", "float", "to[i] = joined_bfloat16(a, b);"),
    "joined_float16": ("float a, float b", "float", "to[i] = joined_float16(a, b);"),
    "low_bfloat16": ("float a, float b", "float", "to[i] = low_bfloat16(a, b);"),
    "low_float16": ("float a, float b", "float", "to[i] = low_float16(a, b);"),
    "round_bfloat16": ("float a, float b", "float", "to[i] = round_bfloat16(a, b);"),
    "round_float16": ("float a, float b", "float", "to[i] = round_float16(a, b);"),
    "uniform": ("int64_t a", "float", "to[i] = uniform(a, 1.f, 2.f, 65535.f, 4.f, 5.f, 6.f);"),
    "scale_of": ("float a", "float", "to[i] = widen(scale_of(__float_as_uint(a) & 0x7fffffffu));"),
    "step_of": ("BFloat16 a", "float", "to[i] = step_of<signed char>(a);"),
    "codes": ("float a, BFloat16 b", "int", "to[i] = code_of<unsigned char>(a, factor_of<unsigned char>(b));"),
}


MIXED = {
    f"{word} of {a} and {b}": (f"{a} a, {b} b", to, f"to[i] = a {sign} b;")
    for (word, sign), (a, b) in product(
        {"sum": "+", "difference": "-", "product": "*", "quotient": "/", "equal": "==", "unequal": "!="}.items(),
        [("Complex", "Complex"), ("Complex", "float"), ("float", "Complex")],
    )
    for to in ["int" if word in ("equal", "unequal") else "Complex"]
    if to == "Complex" or a == "Complex"
}
"""Operations of complex numbers with each other and with real ones, on either side."""

WORDS |= {name.replace(" ", "_"): how for name, how in MIXED.items()}


def _text():
    made = ["typedef float W;", *(header(f"{name}.cuh") for name in HEADERS)]
    for name, (given, to, body) in WORDS.items():
        parts = [x.split() for x in given.split(", ")]
        types = ", ".join(f"const {kind}* {x}_" for kind, x in parts)
        reads = " ".join(f"const {kind} {x} = {x}_[i];" for kind, x in parts)
        made.append(KERNEL.format(name=name, types=types, to=to, body=f"{{ {reads} {body} }}"))
    return "\n".join(made)


@pytest.fixture(scope="module")
def module():
    return Module(code=_text(), names=[f"of_{name}" for name in WORDS])


def run(module, name, kind, *given):
    """The results of a function for these values."""
    given = [np.ascontiguousarray(x) for x in given]
    to, n = np.zeros(given[0].shape, kind), given[0].size
    module.get_function(f"of_{name}")((-(-n // 256),), (256,), [*given, to, np.int32(n)], ftz=False)
    return to


AWKWARD = np.array(
    [0.0, -0.0, 1.0, -1.0, 2.5, -0.3, 7.0, -7.5, 1e-30, 3e38, np.inf, -np.inf, np.nan, 65504.0, 65520.0], np.float32
)
PAIRS = [np.ascontiguousarray(x.ravel()) for x in np.meshgrid(AWKWARD, AWKWARD)]
EVERY = np.arange(1 << 16, dtype=np.uint16)
"""All patterns of 16 bits."""


@pytest.mark.parametrize("name", ["maximum", "minimum", "sign", "finite"])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_operations_of_awkward_numbers(module, name):
    known = {"maximum": np.maximum, "minimum": np.minimum, "sign": np.sign, "finite": np.isfinite}
    given = PAIRS if name in ("maximum", "minimum") else [AWKWARD]
    np.testing.assert_array_equal(run(module, name, "f4", *given), known[name](*given).astype("f4"))


def test_a_remainder_has_the_sign_of_the_divisor(module):
    a, b = (x.astype("f4") for x in np.meshgrid([7.0, -7.5, 0.25, -3.0], [2.0, -2.0, 3.0, -0.5]))
    np.testing.assert_array_equal(run(module, "modulo", "f4", a, b), np.mod(a, b))


@pytest.mark.parametrize("name", MIXED)
def test_complex_and_real_numbers(module, name):
    word, _, first, _, second = name.split(" ")
    real = np.array([0.0, 1.0, -2.5, 0.75], np.float32)
    every = np.array([complex(x, y) for x, y in product(real, real)], np.complex64)
    of = {"Complex": every, "float": real}
    a, b = (np.ascontiguousarray(x.ravel()) for x in np.meshgrid(of[first], of[second], indexing="ij"))
    a, b = (a[b != 0], b[b != 0]) if word == "quotient" else (a, b)
    ufuncs = {
        "sum": "add",
        "difference": "subtract",
        "product": "multiply",
        "quotient": "divide",
        "unequal": "not_equal",
    }
    known = getattr(np, ufuncs.get(word, word))(a, b)
    kind = "i4" if word in ("equal", "unequal") else "c8"
    np.testing.assert_allclose(run(module, name.replace(" ", "_"), kind, a, b), known, rtol=1e-6, atol=1e-6)


def test_complex_numbers(module):
    parts = np.array([0.0, 1.0, -2.5, 3e30, -1e-30], np.float32)
    every = np.array([complex(x, y) for x, y in product(parts, parts)], np.complex64)
    a, b = (np.ascontiguousarray(x.ravel()) for x in np.meshgrid(every, every[1:]))
    np.testing.assert_array_equal(run(module, "conjugate", "c8", every), every.conj())
    np.testing.assert_allclose(run(module, "magnitude", "f4", every), np.abs(every), rtol=1e-6)
    wide = a.astype("c16") / b
    kept = np.abs(wide) < 1e37
    np.testing.assert_allclose(run(module, "over", "c8", a, b)[kept], wide[kept].astype("c8"), rtol=1e-5, atol=1e-37)
    small = (np.abs(a) < 10) & (np.abs(b) < 10)
    np.testing.assert_allclose(run(module, "times", "c8", a[small], b[small]), a[small] * b[small], rtol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("half", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
@pytest.mark.filterwarnings("ignore:invalid value|overflow")
def test_numbers_of_16_bits(module, name, kind):
    """All of them to 32 bits and back; and numbers at, and next to, the middle between two of them."""
    wide = EVERY.view(kind).astype(np.float32)
    np.testing.assert_array_equal(run(module, f"widen_{name}", "f4", EVERY), wide)
    bits, numbers = wide.view(np.uint32).astype(np.int64), np.isfinite(wide)
    half = 1 << (12 if name == "half" else 15)
    near = [bits, *(bits + x for x in (half - 1, half, half + 1, -half, -half + 1, -half - 1))]
    values = (np.stack(near)[:, numbers] & WORD).astype(np.uint32).view(np.float32)
    values = np.concatenate([values.ravel(), AWKWARD, np.array([1e-7, 2.9e-8, 3e-8, 6e-8, 1e-45], np.float32)])
    found = run(module, f"narrow_{name}", "u2", values).view(kind)
    np.testing.assert_array_equal(found.astype("f4"), values.astype(kind).astype("f4"))
    nans = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0x7F802000, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(run(module, f"narrow_{name}", "u2", nans).view(kind).astype("f4")).all()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.filterwarnings("ignore:invalid value|overflow")
def test_what_masters_have_more_and_random_rounding(module, name):
    kind = np.float16 if name == "float16" else ml_dtypes.bfloat16
    p = EVERY[::7].view(kind).astype(np.float32)
    times = np.array([1.0, 0.9995, 1.0005, 0.998, 1.002, 1.01], np.float32)
    master, p = (np.ascontiguousarray(x.ravel()) for x in (np.outer(times, p), np.outer(np.ones_like(times), p)))
    master = np.nextafter(master, np.float32(np.inf))
    low, joined = f"low_{name}", f"joined_{name}"
    parts = getattr(randomness, low)(np, master, p)
    np.testing.assert_array_equal(run(module, low, "f4", master, p), parts)
    assert np.abs(parts).max() == 127
    others = np.resize(np.arange(-127, 128, dtype="f4"), p.size)  # the parameter may have been written to: set to 0
    for low in (parts, others):
        np.testing.assert_array_equal(run(module, joined, "f4", low, p), getattr(randomness, joined)(np, low, p))
    u = np.random.default_rng(0).random(p.size, np.float32)
    for x, up in ((master, u), (p, 0 * u)):  # what is exact stays
        rounded = getattr(randomness, f"round_{name}")(np, x, up)
        np.testing.assert_array_equal(run(module, f"round_{name}", "f4", x, up), rounded)


def test_random_numbers_of_positions_beyond_32_bits(module):
    positions = np.array([0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 5 * 2**40 + 3], np.int64)
    k0, k1, t = 1 << 16 | 2, 65535 << 16 | 4, 5 << 16 | 6
    expected = [(block(x & WORD, t, k0 + (x >> 32) & WORD, k1)[0] >> 8) / 2**24 for x in positions.tolist()]
    np.testing.assert_array_equal(run(module, "uniform", "f4", positions), np.array(expected, "f4"))


def test_scales_and_codes_of_8_bits(module):
    largest = np.array([0.0, 1e-45, 1e-36, 2.0**-119, 2.0**-120, 1.0, 1.003, 3e38, np.inf, np.nan], np.float32)
    scales = run(module, "scale_of", "f4", largest)
    rounded = largest.astype(ml_dtypes.bfloat16).astype("f4")
    np.testing.assert_array_equal(scales, np.where(rounded < 2.0**-119, 0, rounded))
    bits = scales.astype(ml_dtypes.bfloat16)
    steps = run(module, "step_of", "f4", bits.view(np.uint16))
    np.testing.assert_array_equal(steps, np.where(np.isfinite(scales), scales * np.float32(1 / 127), np.nan))
    ones = np.full(5, 1, ml_dtypes.bfloat16).view(np.uint16)
    x = np.array([1.0, 1.0039, 0.5, 1e-9, 0.0], np.float32)  # a scale may be less than what it is of
    assert run(module, "codes", "i4", x, ones).tolist() == [255, 255, 128, 1, 0]
    ties, top = np.array([2.5, 3.5, 126.5, 0.5], "f4"), np.full(4, 255, ml_dtypes.bfloat16).view(np.uint16)
    assert run(module, "codes", "i4", ties, top).tolist() == [2, 4, 126, 1]
    none = np.array([0.0, np.nan, np.inf], ml_dtypes.bfloat16).view(np.uint16)
    assert run(module, "codes", "i4", np.ones(3, "f4"), none).tolist() == [0, 0, 0]


FOLDS = """
extern "C" __global__ void folds(const float* x, float* to) {
    float largest[1], least[1];
    start<Max>(largest), start<Min>(least);
    largest[0] = Max::fold(0, largest[0], x[threadIdx.x]), least[0] = Min::fold(0, least[0], -x[threadIdx.x]);
    block_fold<Max>(largest), block_fold<Min>(least);
    if (threadIdx.x == 0) to[0] = largest[0], to[1] = least[0];
    for (int i = 2; i < 4; ++i) {
        float sum[1] = {i * x[threadIdx.x]};
        block_fold<Sum>(sum);
        if (threadIdx.x == 255) to[i] = sum[0];
    }
}
"""


@pytest.mark.parametrize("seed", range(2))
def test_folds_of_a_block_one_after_the_other(seed):
    """Of negative and of positive numbers; a fold does not overwrite what threads still read in the one before."""
    text = "\n".join(["typedef float W;", *(header(f"{name}.cuh") for name in ("arithmetic", "sums")), FOLDS])
    x, to = -1 - np.random.default_rng(0).permutation(256).astype("f4"), np.zeros(4, "f4")
    module = Module(code=text, names=["folds"], check=True)
    module.get_function("folds")((1,), (256,), [x, to], random=True, seed=seed)
    assert to.tolist() == [-1, 1, 2 * x.sum(), 3 * x.sum()]


TURNS = """
constexpr int kMostSums = 70;
{}
extern "C" __global__ void turns(const float* x, float* work, const long long* first) {{
    begin_sums<Sum>(kMostSums);
    for (int k = 0; k < kMostSums; ++k) take_in<Sum>(k, k * x[threadIdx.x]);
    keep_all<Sum>(kMostSums, work, first, 1);
}}
"""


@pytest.mark.parametrize("seed", range(2))
def test_sums_of_more_members_than_a_warp_has_lanes(seed):
    """Each warp computes its own sums, and the block adds them up after all warps."""
    arithmetic, sums, turns = (header(f"{name}.cuh") for name in ("arithmetic", "sums", "turns"))
    text = "\n".join(["typedef float W;", arithmetic, sums, TURNS.format(turns)])
    x, work, first = np.arange(256, dtype="f4"), np.zeros(140, "f4"), 2 * np.arange(70)[::-1].copy()
    module = Module(code=text, names=["turns"], check=True)
    module.get_function("turns")((1,), (256,), [x, work, first], random=True, seed=seed)
    assert work[first + 1].tolist() == (np.arange(70) * x.sum()).tolist()


def test_totals_are_added_up_in_the_order_of_the_tensors():
    """So a total has the same bits for any number of ranks. Two totals, of which one has more numbers than threads."""
    rng, ends = np.random.default_rng(0), np.array([0, 300, 305], np.int32)
    numbers, to = rng.standard_normal(305) * 10.0 ** rng.integers(-9, 9, 305), np.zeros(305)
    tables = (x.ctypes.data + 8 * np.arange(305) for x in (numbers, to))
    module = Module(code=header("totals.cuh"), names=["total_sum"])
    module.get_function("total_sum")((2,), (256,), [ends, *tables, None])
    sums = [sum(numbers[:300].tolist())] * 300 + [sum(numbers[300:].tolist())] * 5
    assert to.tolist() == sums
