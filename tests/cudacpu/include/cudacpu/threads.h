// Threads: where one is, and what it waits for others with. The functions are the runtime's (runtime/synchronise.cpp).
#pragma once
#include <stdint.h>
#include <string.h>

#include "types.h"

extern "C" {
struct cudacpu_index {
    uint3 thread, block, block_size, grid_size;
};
extern cudacpu_index cudacpu_here; // of the thread that runs

void cudacpu_syncthreads(int line);
int cudacpu_syncthreads_vote(int line, int operation, int predicate);
uint64_t cudacpu_warp(int line, int operation, unsigned mask, uint64_t value, int source, unsigned width);
unsigned cudacpu_activemask();
void cudacpu_gridsync(int line);
void cudacpu_fence();
void cudacpu_before_atomic(const volatile void* address, size_t size, void* caller);
void cudacpu_after_atomic(int changed);
void cudacpu_constant(const volatile void* address, size_t size); // is read through the read-only cache
void cudacpu_poll(int certainly); // a place where a thread may be waiting for another
void cudacpu_trap(int line);
}
enum { kVoteCount, kVoteAll, kVoteAny };
enum { kShuffle, kShuffleUp, kShuffleDown, kShuffleXor, kBallot, kSyncWarp };

#define threadIdx (cudacpu_here.thread)
#define blockIdx (cudacpu_here.block)
#define blockDim (cudacpu_here.block_size)
#define gridDim (cudacpu_here.grid_size)
#define warpSize 32

#define __syncthreads() cudacpu_syncthreads(__LINE__)
#define __syncthreads_count(p) cudacpu_syncthreads_vote(__LINE__, kVoteCount, !!(p))
#define __syncthreads_and(p) cudacpu_syncthreads_vote(__LINE__, kVoteAll, !!(p))
#define __syncthreads_or(p) cudacpu_syncthreads_vote(__LINE__, kVoteAny, !!(p))
#define __threadfence() cudacpu_fence()
#define __threadfence_system() cudacpu_fence()
#define __threadfence_block() ((void)0) // orders nothing between blocks
#define __nanosleep(ns) ((void)(ns), cudacpu_poll(1))
#define __trap() cudacpu_trap(__LINE__)

template <class T> static inline uint64_t cudacpu_bits(T value) {
    static_assert(sizeof(T) <= 8, "a shuffle takes up to 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <class T> static inline T cudacpu_from_bits(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T>
static inline T cudacpu_shuffle(int line, int operation, unsigned mask, T value, int source, int width = 32) {
    return cudacpu_from_bits<T>(cudacpu_warp(line, operation, mask, cudacpu_bits(value), source, width));
}
static inline void cudacpu_syncwarp(int line, unsigned mask = 0xffffffffu) {
    cudacpu_warp(line, kSyncWarp, mask, 0, 0, 32);
}
#define __shfl_sync(mask, value, ...) cudacpu_shuffle(__LINE__, kShuffle, mask, value, __VA_ARGS__)
#define __shfl_up_sync(mask, value, ...) cudacpu_shuffle(__LINE__, kShuffleUp, mask, value, __VA_ARGS__)
#define __shfl_down_sync(mask, value, ...) cudacpu_shuffle(__LINE__, kShuffleDown, mask, value, __VA_ARGS__)
#define __shfl_xor_sync(mask, value, ...) cudacpu_shuffle(__LINE__, kShuffleXor, mask, value, __VA_ARGS__)
#define __ballot_sync(mask, p) ((unsigned)cudacpu_warp(__LINE__, kBallot, mask, !!(p), 0, 32))
#define __any_sync(mask, p) (__ballot_sync(mask, p) != 0)
#define __all_sync(mask, p) (__ballot_sync(mask, !(p)) == 0)
#define __syncwarp(...) cudacpu_syncwarp(__LINE__ __VA_OPT__(, ) __VA_ARGS__)
#define __activemask() cudacpu_activemask()
