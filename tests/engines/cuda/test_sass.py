"""What the compiled code of each rule must have, read off its instructions: words, bytes in flight, fences, spills."""

from dataclasses import replace

import pytest

from tests.engines.cuda.test_cuda_compile import ARCHS
from tests.support import sass
from tests.support.sass_table import (
    ARCH,
    BEGIN,
    COPY,
    DEVICES,
    END,
    LATENCY,
    PAGE,
    RULES,
    START,
    Row,
    bound,
    compiler,
    lines,
    look,
    seconds,
    table,
)
from tests.support.slow import marked

pytestmark = pytest.mark.skipif(not sass.available(), reason="NVRTC or nvdisasm is not installed")

QUICK = ("AdamW", "LANS", "judging", "LAMB, bfloat16")
LEAST = 24 << 10
"""Bytes that a multiprocessor is to wait for at once, in each pass."""

each = pytest.mark.parametrize(
    ("name", "arch"), marked([(n, a) for n in RULES for a in ARCHS], lambda n, a: n in QUICK and a == ARCH)
)


@each
def test_every_pass_waits_for_enough_bytes_at_once(name, arch):
    for x in look(name, arch)[1]:
        assert x.facts.in_flight >= LEAST, x


@each
def test_arrays_are_read_and_written_in_words_of_16_bytes(name, arch):
    if arch in ("sm_100", "sm_120"):
        pytest.skip("its compiler halves words and moves them to other lines, so that they are not told apart")
    for x in look(name, arch)[1]:
        assert x.facts.loads.count(128) >= len(x.loads) - x.narrow
        assert x.facts.loads.count(64) >= x.narrow
        assert len([width for width in x.facts.stores if width >= (64 if x.narrow else 128)]) >= len(x.stores)


@each
def test_no_load_or_store_has_to_find_out_what_memory_it_is_of(name, arch):
    assert look(name, arch)[0].count("LD", "ST") == 0


@each
def test_a_rule_of_one_pass_has_no_fence_and_others_have_two(name, arch):
    kernel, passes = look(name, arch)
    alone = len(passes) == 1 and name != "judging"
    assert kernel.count("MEMBAR") == (0 if alone else 2)


@each
def test_nothing_is_read_through_the_read_only_cache(name, arch):
    """It keeps what it has until a launch ends, and compilers choose it where they think that nobody writes."""
    kernel = look(name, arch)[0]
    assert [i.opcode for i in kernel.code if "CONSTANT" in i.opcode] == []


@each
def test_passes_convert_nothing_from_double_precision(name, arch):
    assert [x.facts.doubles for x in look(name, arch)[1]] == [0] * len(look(name, arch)[1])


@each
def test_registers_are_not_spilled(name, arch):
    used = look(name, arch)[0].usage
    assert used.spill_stores == used.spill_loads == 0


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in RULES])
def test_the_table_of_the_page_is_what_the_compiler_makes_now(name):
    page = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    if compiler() not in page:
        pytest.skip(f"the table is of another compiler: {page.split('.')[0].strip()}")
    assert "\n".join(lines(name)) in page, "python -m tests.support.sass_table writes it anew"


def test_the_model():
    """A block that waits for 16 KB at once, three of them, one pass without sums; with sums; with a piece ahead."""
    row = Row(("p",), ("p",), 8, sass.PassFacts(48 << 10, 0, (), (), 0), 3, 4, 4096, 1, False, True)
    copied = 8 / (COPY * DEVICES["H200"][1])
    assert seconds(replace(row, elements=1 << 20), "H200") == pytest.approx(copied)
    alone = (LATENCY + START) / (3 * 132 * 4096)
    assert seconds(row, "H200") == pytest.approx(max(copied, alone))
    few = replace(row, moved=2, read=2, sums=True, alone=False, pieces=4, facts=replace(row.facts, in_flight=24 << 10))
    ahead = replace(few, facts=replace(few.facts, ahead=8 << 10))
    assert seconds(few, "H200") > seconds(ahead, "H200") >= 2 / (COPY * DEVICES["H200"][1])
    assert bound([row, row], "H200") == pytest.approx(copied / seconds(row, "H200"))


def test_the_model_gives_what_others_have_measured(monkeypatch):
    """PyTorch's fused AdamW, all in bfloat16, over a 128th of Llama 2 70B on an H100 with HBM2e (2.4 TB/s): 3.564 ms
    (pytorch/pytorch#119842). A block of it has 512 threads, of four elements each. And copies: see `COPY`.
    """
    monkeypatch.setitem(DEVICES, "H100", (132, 2.4e12))
    facts = sass.PassFacts(2 * 512 * 4 * 8, 0, (), (), 0)
    adamw = Row(("p", "g", "m", "v"), ("p", "m", "v"), 14, facts, 2, 8, 65536, 1, False, True)
    assert 68.98e9 / 128 * seconds(adamw, "H100") == pytest.approx(3.564e-3, rel=0.15)
    assert pytest.approx(1727.5 / 1935, rel=0.15) == COPY
    assert pytest.approx(7.087 / 7.672, rel=0.15) == COPY


AIMS = {"AdamW": 0.9, "LAMB": 0.9, "SGD": 0.9, "LANS": 0.85, "CAME": 0.7}
"""Of the speed of a copy, by the model, on an H200."""


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in AIMS])
def test_the_model_says_that_rules_are_about_as_fast_as_a_copy(name):
    assert bound(look(name)[1], "H200") >= AIMS[name]


def test_the_reader_sees_what_it_looks_for():
    """Loads that are used one by one, a generic load, a fence, a conversion: none of it goes unseen."""
    text = """
    struct Step { int x; };
    __device__ __forceinline__ void stage0(const float4* x, float* y, double* d) {
        float sum = 0;
    #pragma unroll 1
        for (int i = 0; i < 4096; ++i) {
            const float4 a = x[i * 256];
            sum += a.x * a.y * a.z * a.w;
        }
        asm volatile("st.f32 [%0], %1;" : : "l"(y), "f"(sum + (float)d[threadIdx.x]));
        __threadfence();
    }
    extern "C" __global__ void __launch_bounds__(256) run(const float4* x, float** y, double* d) {
        stage0(x + threadIdx.x, y[threadIdx.x], d);
    }
    """.replace("\n    ", "\n")
    kernel = sass.kernel(text, ARCH)
    found = sass.facts(kernel, 0)
    assert found.in_flight == 16 * 256 * kernel.resident
    assert (found.doubles, kernel.count("MEMBAR"), kernel.count("LD", "ST")) == (1, 1, 1)


@pytest.mark.slow
def test_the_whole_table():
    page = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    if compiler() not in page:
        pytest.skip("the table is of another compiler")
    assert page.strip() == "\n".join(table())
