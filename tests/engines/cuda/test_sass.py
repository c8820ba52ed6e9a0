"""Requirements on the compiled code of each rule: word sizes, bytes in flight, fences, spills."""

import pytest

from tests.engines.cuda.test_cuda_compile import ARCHS
from tests.support import sass
from tests.support.sass_table import ARCH, BEGIN, END, MORE, PAGE, RULES, compiler, lines, look, table
from tests.support.slow import marked

pytestmark = pytest.mark.skipif(not sass.available(), reason="NVRTC or nvdisasm is not installed")

QUICK = ("AdamW", "LANS", "judging", "LAMB, bfloat16", "LAMB, int8, split, bfloat16")
LEAST = 24 << 10
"""The least bytes in flight of a multiprocessor, in each pass."""

CASES = [*((name, arch) for name in RULES for arch in ARCHS), *((name, ARCH) for name in MORE)]

each = pytest.mark.parametrize(("name", "arch"), marked(CASES, lambda name, arch: name in QUICK and arch == ARCH))


@each
def test_every_pass_waits_for_enough_bytes_at_once(name, arch):
    for x in look(name, arch)[1]:
        assert x.facts.in_flight >= LEAST, x


@each
def test_arrays_are_read_and_written_in_words_of_16_bytes(name, arch):
    if arch in ("sm_100", "sm_120"):
        pytest.skip("its compiler halves words and moves them to other lines, so that they are not told apart")
    for x in look(name, arch)[1]:
        assert x.facts.loads.count(128) >= x.wide
        assert x.facts.loads.count(64) >= x.narrow
        assert len([width for width in x.facts.stores if width >= (64 if x.narrow else 128)]) >= x.words


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


SPILLED = {"CAME": 64, "Adan": 16}
"""Bytes of a thread's registers that may be spilled: with three blocks CAME is quicker than with two, without."""


@each
def test_registers_are_not_spilled(name, arch):
    used, most = look(name, arch)[0].usage, SPILLED.get(name.partition(",")[0], 0)
    assert max(used.spill_stores, used.spill_loads) <= most


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in RULES])
def test_the_table_of_the_page_is_what_the_compiler_makes_now(name):
    page = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    if compiler() not in page:
        pytest.skip(f"the table is of another compiler: {page.split('.')[0].strip()}")
    assert "\n".join(lines(name)) in page, "python -m tests.support.sass_table writes it anew"


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
