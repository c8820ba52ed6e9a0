// What the parts of the runtime share: the fibers of CUDA threads, the blocks that they form, and the launch in hand.
//
// One OS thread runs everything, so a schedule repeats exactly. A CUDA thread is a fiber with a stack of its own. The
// threads of a block run until they wait, one after the other; blocks take turns. A block's shared memory is the
// thread-local storage of the kernel's library, swapped in for its turn and out after it.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <deque>
#include <string>
#include <vector>

#include "../include/cudacpu/threads.h"

// How many releases of each block are known to have happened; a block that is not named: none.
struct Clock {
    std::vector<uint32_t> known;

    uint32_t at(size_t block) const { return block < known.size() ? known[block] : 0; }
    void raise(size_t block, uint32_t count) {
        if (known.size() <= block) known.resize(block + 1);
        if (known[block] < count) known[block] = count;
    }
    void join(const Clock& other) {
        for (size_t block = 0; block < other.known.size(); ++block) raise(block, other.known[block]);
    }
};

// One access to memory, as shadow memory remembers it.
struct Mark {
    uint32_t thread : 29;     // 1 + the thread's number in the grid; 0: no access
    uint32_t atomic : 1;
    uint32_t many : 1;        // several threads of that block, the last of which is named
    uint32_t warps : 1;       // these are of several warps
    uint32_t epoch : 20;      // barriers that the block had passed
    uint32_t warp_epoch : 12; // __syncwarp() that the thread had passed since
    uint32_t releases;        // releases that the block had made
};

// The shadow of a byte: the last write, the last read since, and the last read of another block.
struct Cell {
    Mark write, read, other;
};
constexpr size_t kGranule = 1;

enum class State { kReady, kBarrier, kWarp, kGrid, kDone };

struct WarpCall {
    int operation, source;
    unsigned mask, width;
    uint64_t value, result;
};

struct Block;

struct Fiber {
    Block* block;
    int thread;
    State state;
    int line; // where it waits
    void* stack_pointer;
    char* stack;
    uint3 index;
    WarpCall call;
    uint32_t warp_epoch;
    bool unfenced;       // it wrote to global memory, or knows of such a write, with no fence since
    Clock pending, seen; // releases that it saw: before, and with, a fence after them
};

struct Block {
    long number;
    uint3 index;
    std::vector<Fiber> fibers;
    char* stacks;
    int alive = 0, at_barrier = 0, at_grid = 0, barrier_line = 0;
    int votes[2] = {0, 0};
    std::deque<int> ready;
    std::vector<char> shared; // its shared memory, while another block has its turn
    std::vector<Cell> shadow; // of shared memory
    uint32_t epoch = 0;       // barriers passed
    Clock pending, seen;      // as a fiber's, for all its threads
};

struct Release {
    int thread;
    uint32_t epoch, warp_epoch;
};
constexpr int kAllThreads = -1;

// What a launch is given; laid out as in launch.py.
struct Options {
    int residents, cooperative, check, random, flush, device;
    unsigned seed, dynamic_bytes;
    size_t shared_count;
    const size_t* shared_variables; // offset and size of each in thread-local storage
    char* (*dynamic)(size_t*);      // the dynamic shared array and its room, or null
    void (*touch)();                // has thread-local storage made
};

struct Launch {
    void (*kernel)(void**);
    void** arguments;
    Options options;
    dim3 grid, block;
    int threads;
    long blocks, started = 0;
    bool failed = false, hand_over = false;
    uint64_t random_state;
    long idle = 0;           // turns given up since anything changed
    unsigned turn_points = 0;
    char *shared_low = nullptr, *shared_high = nullptr, *dynamic_low = nullptr;
    std::vector<Block*> resident;
    std::vector<std::vector<Release>> releases; // of each block
};

extern Launch* launch;
extern Block* block; // the one whose turn it is
extern Fiber* fiber; // the thread that runs
extern char *module_low, *module_high;

// fibers.cpp
constexpr size_t kStack = 64 << 10;
void* first_stack_pointer(char* top, void (*entry)());
extern "C" void cudacpu_switch(void** save, void* to);

// schedule.cpp
uint64_t random_number();
void wake(Fiber& sleeper);
void wait_here();                 // to the scheduler, until woken
void give_up_turn(bool another);  // to the end of the block's queue; `another`: another block may go on too
[[noreturn]] void fail();         // ends the launch, from within a thread
void progress();                  // something changed: whoever polls does not do so in vain

// synchronise.cpp
void thread_left(); // a thread ended: barriers no longer wait for it
void release_grid();

// checks.cpp
enum class Fault { kMemory, kRace, kUninitialised, kBarrier, kDeadlock, kMask };
void report(Fault fault, uintptr_t pc, int line, const char* format, ...) __attribute__((format(printf, 4, 5)));
void forget_reports();
void forget_accesses();
void end_accesses();
void check_constant(uintptr_t address, size_t size, uintptr_t pc);
bool is_private(uintptr_t address);
void check_access(uintptr_t address, size_t size, bool reads, bool writes, bool atomic, uintptr_t pc);
void acquire(uintptr_t address);
void release(uintptr_t address);
void release_all();
