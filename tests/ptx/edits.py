"""Changes to the text of GPGPU-Sim (90ec3399, of October 2020), which kernels of today need: (file, text, what takes its place).

Each is of lines of its own; where a text is not there, that is another GPGPU-Sim, and `edited` raises.
"""

from pathlib import Path

__all__ = ["EDITS", "edited"]

WIDE = "t.{0}64 = a.{0}32 * b.{0}32;"
WIDENED = "t.{0}64 = ({1})a.{0}32 * b.{0}32;"

EDITS = [
    # Numbers: a conversion from 64 bits, products of 32 bits, bits put into 64, bytes chosen
    # from two words, signs of loaded bytes, fma, 1/x and 1/sqrt(x) in double precision were wrong.
    ("src/cuda-sim/instructions.cc", "ptx_reg_t s2f(ptx_reg_t x, unsigned from_width, unsigned to_width, int to_sign,\n              int rounding_mode, int saturation_mode) {\n  ptx_reg_t y;", "ptx_reg_t s2f(ptx_reg_t x, unsigned from_width, unsigned to_width, int to_sign,\n              int rounding_mode, int saturation_mode) {\n  ptx_reg_t y = x;"),
    ("src/cuda-sim/instructions.cc", "ptx_reg_t u2f(ptx_reg_t x, unsigned from_width, unsigned to_width, int to_sign,\n              int rounding_mode, int saturation_mode) {\n  ptx_reg_t y;", "ptx_reg_t u2f(ptx_reg_t x, unsigned from_width, unsigned to_width, int to_sign,\n              int rounding_mode, int saturation_mode) {\n  ptx_reg_t y = x;"),
    ("src/cuda-sim/instructions.cc", WIDE.format("s"), WIDENED.format("s", "long long")),
    ("src/cuda-sim/instructions.cc", WIDE.format("u"), WIDENED.format("u", "unsigned long long")),
    ("src/cuda-sim/instructions.cc", "d.f32 = a.f32 * b.f32 + c.f32;", "d.f32 = fmaf(a.f32, b.f32, c.f32);"),
    ("src/cuda-sim/instructions.cc", "d.f64 = a.f64 * b.f64 + c.f64;", "d.f64 = fma(a.f64, b.f64, c.f64);"),
    ("src/cuda-sim/instructions.cc", "      if (a.f32 < 0) {\n        d.u64 = 0;\n        d.u32 = 0x7fc00000;  // NaN\n        float x", "      if (a.f64 < 0) {\n        d.u64 = 0;\n        d.u32 = 0x7fc00000;  // NaN\n        float x"),
    ("src/cuda-sim/instructions.cc", "      } else if (a.f32 == 0) {\n        d.u64 = 0;\n        d.u32 = 0x7f800000;  // Inf\n        float x", "      } else if (a.f64 == 0) {\n        d.u64 = 0;\n        d.u32 = 0x7f800000;  // Inf\n        float x"),
    ("src/cuda-sim/instructions.cc", "tmpdata.s64 = src1_data.s32 | (src2_data.s64 << 32);", "tmpdata.s64 = (long long)src1_data.u32 | (src2_data.s64 << 32);"),
    ("src/cuda-sim/instructions.cc", "if (type == S16_TYPE || type == S32_TYPE) sign_extend(data", "if (type == S8_TYPE || type == S16_TYPE || type == S32_TYPE) sign_extend(data"),
    ("src/cuda-sim/instructions.cc", "data.f64 = 1.0f / src1_data.f64;", "data.f64 = 1.0 / src1_data.f64;"),
    ("src/cuda-sim/instructions.cc", "    data.u32 = (~((0x00000001) << (pos + i))) & data.u32;\n    data.u32 = data.u32 | ((src1_data.u32 & ((0x00000001) << (i))) << (pos));", "    data.u64 = ~(1ull << (pos + i)) & data.u64;\n    data.u64 = data.u64 | (src1_data.u64 & 1ull << i) << pos;"),
    # A register of a vector that nothing has written is not an error: it is stored and never used.
    ("src/cuda-sim/instructions.cc", "      assert(reg_iter != m_regs.back().end());\n      ptx_regs[idx] = reg_iter->second;", "      ptx_regs[idx] = reg_iter == m_regs.back().end() ? get_reg(sym) : reg_iter->second;"),
    # Global memory from here on is this process's own; see driver.cc.
    ("src/cuda-sim/memory.cc", "  m_name = name;\n", "  m_name = name;\n  m_host = name == \"global\";\n"),
    ("src/cuda-sim/memory.cc", "                                     const ptx_instruction *pI) {\n  mem_addr_t index", "                                     const ptx_instruction *pI) {\n  if (m_host && addr >= GLOBAL_HEAP_START) {\n    memcpy((void *)(size_t)addr, data, length);\n    return;\n  }\n  mem_addr_t index"),
    ("src/cuda-sim/memory.cc", "                                    void *data) const {\n  mem_addr_t index", "                                    void *data) const {\n  if (m_host && addr >= GLOBAL_HEAP_START) {\n    memcpy(data, (const void *)(size_t)addr, length);\n    return;\n  }\n  mem_addr_t index"),
    ("src/cuda-sim/memory.h", "  std::string m_name;\n", "  std::string m_name;\n  bool m_host;\n"),
    # Numbers alone: a warp's shuffle took the lanes of the first warp, and a fence was a barrier.
    ("src/abstract_hardware_model.h", "  unsigned warp_id_func() const  // to be", "  void set_warp_id_func(unsigned id) { m_warp_id = id; }\n  unsigned warp_id_func() const  // to be"),
    # A shuffle of some lanes alone took them for the first of the warp.
    ("src/cuda-sim/instructions.cc", "  int lane = warp_info->get_done_threads();\n", "  int lane = 0;\n  for (int before = warp_info->get_done_threads(); lane < 31; ++lane)\n    if (inst.active(lane) && before-- == 0) break;\n"),
    ("src/cuda-sim/cuda-sim.cc", "    warp_inst_t inst = getExecuteWarp(i);\n", "    warp_inst_t inst = getExecuteWarp(i);\n    inst.set_warp_id_func(i);\n"),
    ("src/cuda-sim/cuda-sim.cc", "inst.op == BARRIER_OP || inst.op == MEMORY_BARRIER_OP", "inst.op == BARRIER_OP"),
    # What was read before it was set, and freed twice.
    ("src/cuda-sim/ptx_ir.h", "  void make_copy(const arg_buffer_t &another) {", "  arg_buffer_t(const arg_buffer_t &another) : m_src_op(another.m_src_op) { make_copy(another); }\n  void make_copy(const arg_buffer_t &another) {"),
    ("src/gpgpusim_entrypoint.cc", "#include <stdio.h>\n", "#include <stdio.h>\n#include <new>\n"),
    ("src/gpgpusim_entrypoint.cc", "g_the_gpu_config = new gpgpu_sim_config(this);", "g_the_gpu_config = new (calloc(1, sizeof(gpgpu_sim_config))) gpgpu_sim_config(this);"),
]  # fmt: skip


def edited(folder):
    """Make the changes in a copy of the sources."""
    for name, old, new in EDITS:
        file = Path(folder) / name
        text = file.read_text()
        if old not in text:
            raise ValueError(
                f"GPGPUSIM: must be a checkout of gpgpu-sim_distribution at 90ec3399; its {name} lacks {old!r}"
            )
        file.write_text(text.replace(old, new))
