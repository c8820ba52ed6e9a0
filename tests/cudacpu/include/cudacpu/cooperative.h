// Of cooperative groups: the grid and the block as a whole.
#pragma once

namespace cooperative_groups {

struct thread_block {
    unsigned size() const { return blockDim.x * blockDim.y * blockDim.z; }
    unsigned thread_rank() const { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
    void sync(int line = __builtin_LINE()) const { cudacpu_syncthreads(line); }
};

struct grid_group {
    unsigned num_blocks() const { return gridDim.x * gridDim.y * gridDim.z; }
    unsigned long long size() const { return (unsigned long long)num_blocks() * thread_block().size(); }
    unsigned long long thread_rank() const {
        const unsigned long long block = blockIdx.x + (unsigned long long)gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        return block * thread_block().size() + thread_block().thread_rank();
    }
    bool is_valid() const { return true; }
    void sync(int line = __builtin_LINE()) const { cudacpu_gridsync(line); }
};

static inline thread_block this_thread_block() { return {}; }
static inline grid_group this_grid() { return {}; }

} // namespace cooperative_groups
