// Who runs next: the threads of a block in turn, the resident blocks in turn; and the launch of a grid.
#include <dlfcn.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <memory>

#include "state.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

Launch* launch;
Block* block;
Fiber* fiber;
char *module_low, *module_high;
extern "C" {
cudacpu_index cudacpu_here;
}

namespace {

constexpr long kIdleTurns = 1000000; // so many turns given up, and nothing changed: it never will
void* scheduler_stack_pointer;
struct Stacks {
    char* low;
    size_t bytes;
};
std::vector<Stacks> spare_stacks;
constexpr size_t kSpare = 4; // more than that many blocks' are given back
Block* active; // whose shared memory is in place

void thread_main() {
    launch->kernel(launch->arguments);
    fiber->state = State::kDone;
    --block->alive;
    progress();
    thread_left();
    wait_here();
}

// Stacks of a block's threads; of most only the last page is ever touched, and takes memory.
char* take_stacks() {
    const size_t bytes = launch->threads * kStack;
    while (!spare_stacks.empty()) {
        const Stacks last = spare_stacks.back();
        spare_stacks.pop_back();
        if (last.bytes == bytes) return last.low;
        munmap(last.low, last.bytes);
    }
    void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) abort();
    return static_cast<char*>(made);
}

void give_stacks(char* low) {
    const size_t bytes = launch->threads * kStack;
    if (spare_stacks.size() < kSpare) spare_stacks.push_back({low, bytes});
    else munmap(low, bytes);
}

Block* start_block() {
    const long number = launch->started++;
    Block* made = new Block;
    made->number = number;
    made->index = {static_cast<unsigned>(number % launch->grid.x),
                   static_cast<unsigned>(number / launch->grid.x % launch->grid.y),
                   static_cast<unsigned>(number / launch->grid.x / launch->grid.y)};
    made->alive = launch->threads;
    made->fibers.resize(launch->threads);
    made->stacks = take_stacks();
    made->shared.assign(launch->shared_high - launch->shared_low, static_cast<char>(0xff)); // as floats: NaN
    if (launch->options.check) made->shadow.assign(made->shared.size() / kGranule + 16, Cell{});
    for (int thread = 0; thread < launch->threads; ++thread) {
        Fiber& each = made->fibers[thread];
        each.block = made;
        each.thread = thread;
        each.state = State::kReady;
        each.index = {thread % launch->block.x, thread / launch->block.x % launch->block.y,
                      thread / launch->block.x / launch->block.y};
        each.stack = made->stacks + thread * kStack;
        const size_t stagger = thread % 61 * 192; // or all stacks would meet in one set of the cache
        each.stack_pointer = first_stack_pointer(each.stack + kStack - stagger, thread_main);
        made->ready.push_back(thread);
    }
    launch->resident.push_back(made);
    progress();
    return made;
}

void end_block(Block* ended) {
    if (active == ended) active = nullptr;
    launch->resident.erase(std::find(launch->resident.begin(), launch->resident.end(), ended));
    give_stacks(ended->stacks);
    delete ended;
}

// Its shared memory takes the place of the last block's.
void put_in_place(Block* next) {
    block = next;
    if (active == next) return;
    const size_t bytes = launch->shared_high - launch->shared_low;
    if (active) memcpy(active->shared.data(), launch->shared_low, bytes);
    if (bytes) memcpy(launch->shared_low, next->shared.data(), bytes);
    active = next;
}

// Runs threads of a block until none can go on, or the turn goes to another block.
void run_turn(Block* mine) {
    put_in_place(mine);
    launch->hand_over = false;
    while (!mine->ready.empty() && !launch->hand_over) {
        if (launch->options.random) std::swap(mine->ready.front(), mine->ready[random_number() % mine->ready.size()]);
        fiber = &mine->fibers[mine->ready.front()];
        mine->ready.pop_front();
        cudacpu_here.thread = fiber->index;
        cudacpu_here.block = mine->index;
        cudacpu_switch(&scheduler_stack_pointer, fiber->stack_pointer);
        if (launch->failed) return;
    }
}

void describe_deadlock() {
    static const char* const kinds[] = {"can go on", "wait in __syncthreads", "wait in a warp operation",
                                        "wait for the grid", "have ended"};
    std::map<std::pair<int, int>, int> counts;
    for (const Block* each : launch->resident)
        for (const Fiber& one : each->fibers) ++counts[{static_cast<int>(one.state), one.line}];
    std::string text;
    int line = 0;
    for (const auto& [what, count] : counts) {
        text += (text.empty() ? "" : "; ") + std::to_string(count) + " threads " + kinds[what.first];
        if (what.first != static_cast<int>(State::kDone) && what.second) {
            text += " at line " + std::to_string(what.second);
            line = what.second;
        }
    }
    report(Fault::kDeadlock, 0, line, "deadlock: of %zu resident blocks, %s", launch->resident.size(), text.c_str());
    launch->failed = true;
}

void run_grid() {
    const size_t most = launch->options.cooperative ? launch->blocks : launch->options.residents;
    if (launch->options.cooperative)
        while (launch->started < launch->blocks) start_block();
    size_t turn = 0;
    while (!launch->failed) {
        const bool room = launch->resident.size() < most && launch->started < launch->blocks;
        std::vector<Block*> able;
        for (Block* each : launch->resident)
            if (!each->ready.empty()) able.push_back(each);
        const bool begin = launch->options.random ? random_number() % 4 == 0 : launch->hand_over;
        Block* next;
        if (room && (able.empty() || begin)) {
            next = start_block();
        } else if (!able.empty()) {
            next = able[(launch->options.random ? random_number() : ++turn) % able.size()];
        } else if (launch->resident.empty()) {
            return;
        } else {
            const bool all_at_grid = std::all_of(launch->resident.begin(), launch->resident.end(),
                                                 [](const Block* b) { return b->at_grid == b->alive; });
            if (all_at_grid && static_cast<long>(launch->resident.size()) == launch->blocks) release_grid();
            else describe_deadlock();
            continue;
        }
        run_turn(next);
        if (!launch->failed && next->alive == 0) end_block(next);
    }
}

// Where the library of the kernel lies, and its thread-local storage.
struct Where {
    uintptr_t kernel;
    dl_phdr_info found;
};

int find_library(dl_phdr_info* info, size_t, void* data) {
    Where* where = static_cast<Where*>(data);
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& part = info->dlpi_phdr[i];
        const uintptr_t low = info->dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_LOAD && where->kernel >= low && where->kernel < low + part.p_memsz) {
            where->found = *info;
            return 1;
        }
    }
    return 0;
}

void locate_library() {
    launch->options.touch();
    Where where{reinterpret_cast<uintptr_t>(launch->kernel), {}};
    dl_iterate_phdr(find_library, &where);
    uintptr_t low = UINTPTR_MAX, high = 0;
    for (int i = 0; i < where.found.dlpi_phnum; ++i) {
        const auto& part = where.found.dlpi_phdr[i];
        const uintptr_t from = where.found.dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_LOAD) {
            low = std::min(low, from);
            high = std::max(high, from + part.p_memsz);
        } else if (part.p_type == PT_TLS) {
            launch->shared_low = static_cast<char*>(where.found.dlpi_tls_data);
            launch->shared_high = launch->shared_low + part.p_memsz;
        }
    }
    module_low = reinterpret_cast<char*>(low);
    module_high = reinterpret_cast<char*>(high);
}

} // namespace

uint64_t random_number() {
    uint64_t& x = launch->random_state; // xorshift
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return x;
}

void wake(Fiber& sleeper) {
    sleeper.state = State::kReady;
    sleeper.block->ready.push_back(sleeper.thread);
}

void wait_here() { cudacpu_switch(&fiber->stack_pointer, scheduler_stack_pointer); }

void fail() {
    launch->failed = true;
    wait_here();
    __builtin_unreachable();
}

void progress() { launch->idle = 0; }

void give_up_turn(bool another) {
    if (++launch->idle > kIdleTurns) {
        describe_deadlock();
        fail();
    }
    // A thread that alone can go on may be polling for what another block does.
    launch->hand_over = another || block->ready.empty() || launch->idle % 64 == 0;
    block->ready.push_back(fiber->thread);
    wait_here();
}

extern "C" int cudacpu_launch(void (*kernel)(void**), void** arguments, const unsigned* grid, const unsigned* threads,
                              const Options* options) {
    Launch mine{};
    launch = &mine;
    mine.kernel = kernel;
    mine.arguments = arguments;
    mine.options = *options;
    mine.grid = dim3(grid[0], grid[1], grid[2]);
    mine.block = dim3(threads[0], threads[1], threads[2]);
    mine.blocks = static_cast<long>(grid[0]) * grid[1] * grid[2];
    mine.threads = threads[0] * threads[1] * threads[2];
    mine.random_state = (options->seed + 1) * 0x9E3779B97F4A7C15ull;
    mine.releases.resize(options->check ? mine.blocks : 0);
    cudacpu_here.block_size = {threads[0], threads[1], threads[2]};
    cudacpu_here.grid_size = {grid[0], grid[1], grid[2]};
    locate_library();
    size_t room = 0;
    if (options->dynamic) mine.dynamic_low = options->dynamic(&room);
    forget_reports();
    if (options->dynamic_bytes > room) {
        report(Fault::kMemory, 0, 0, "%u bytes of dynamic shared memory were asked for; the module has room for %zu",
               options->dynamic_bytes, room);
        mine.failed = true;
    }
    forget_accesses();
#if defined(__x86_64__)
    const unsigned before = _mm_getcsr();
    const unsigned flush = 0x8040; // subnormal numbers are zero, as results and as operands
    _mm_setcsr(options->flush ? before | flush : before & ~flush);
#endif
    run_grid();
#if defined(__x86_64__)
    _mm_setcsr(before);
#endif
    active = nullptr;
    while (!mine.resident.empty()) end_block(mine.resident.back());
    end_accesses();
    const int failed = mine.failed;
    launch = nullptr;
    block = nullptr;
    fiber = nullptr;
    return failed;
}
