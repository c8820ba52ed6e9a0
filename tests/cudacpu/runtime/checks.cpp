// What a checked launch looks at: is an access within memory, aligned, of something written; and is it ordered with the
// accesses of other threads by barriers, fences and atomics, whatever the schedule was?
//
// Order between blocks. A thread that has fenced what it knows *releases* by an atomic: whoever reads that atomic later,
// and then fences, *acquires* what the releasing thread had done, and what its block had done before the last barrier.
// Without the fence on either side there is no order. Volatile accesses count as atomics.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "state.h"

namespace {

struct Allocation {
    uintptr_t low, high;
    Cell* shadow;        // for the launch in hand, once it has come here
    uint8_t* unwritten;  // per granule, or null: all is written
    bool writable;
    std::string name;
    int device = -1; // that it is of, if it is of one
    uintptr_t used[4] = {0, 0, 0, 0};      // what the launch has read and written: from and to
    std::vector<bool> constant = {};       // what it has read through the read-only cache, if anything
};

struct Report {
    std::string text;
    uintptr_t pc;
    int line;
};

std::map<uintptr_t, Allocation> allocations; // by their first address
std::vector<Report> reports;
std::set<std::pair<Fault, uintptr_t>> reported;
std::unordered_map<uintptr_t, Clock> released; // to whoever reads that atomic

std::vector<Allocation*> touched; // in the launch in hand, or the last

size_t granules(const Allocation& memory) { return (memory.high - memory.low) / kGranule + 9; }

// Zeros, of which only those that are looked at take memory.
void touch(Allocation& memory) {
    void* made = mmap(nullptr, granules(memory) * sizeof(Cell), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) abort();
    memory.shadow = static_cast<Cell*>(made);
    touched.push_back(&memory);
}

void drop_shadow(Allocation& memory) {
    if (memory.shadow) munmap(memory.shadow, granules(memory) * sizeof(Cell));
    memory.shadow = nullptr;
}

void note_use(Allocation& memory, uintptr_t low, uintptr_t high, bool writes) {
    uintptr_t* used = memory.used + 2 * writes;
    if (!used[1] || low < used[0]) used[0] = low;
    if (high > used[1]) used[1] = high;
}

Allocation* below(uintptr_t address) {
    auto next = allocations.upper_bound(address);
    return next == allocations.begin() ? nullptr : &std::prev(next)->second;
}

Allocation* last_found; // accesses come in runs

Allocation* find(uintptr_t address) {
    if (last_found && address >= last_found->low && address < last_found->high) return last_found;
    Allocation* found = below(address);
    return found && address < found->high ? last_found = found : nullptr;
}

const char* verb(bool writes) { return writes ? "write" : "read"; }

// Does that access happen before what this thread does now, on every schedule?
bool ordered(const Mark& mark) {
    const long number = (mark.thread - 1) / launch->threads;
    const int thread = (mark.thread - 1) % launch->threads;
    if (number == block->number) {
        if (mark.epoch < block->epoch || (thread == fiber->thread && !mark.many)) return true;
        return !mark.warps && thread / 32 == fiber->thread / 32 && mark.warp_epoch < fiber->warp_epoch;
    }
    const std::vector<Release>& log = launch->releases[number];
    const uint32_t known = std::max(block->seen.at(number), fiber->seen.at(number));
    for (uint32_t next = known; next > mark.releases; --next) {
        const Release& made = log[next - 1];
        if (made.epoch > mark.epoch || made.thread == kAllThreads) return true;
        if (mark.many) continue;
        if (made.thread == thread || (made.thread / 32 == thread / 32 && mark.warp_epoch < made.warp_epoch)) return true;
    }
    return false;
}

struct Place {
    const char* kind;
    const char* name;
    size_t offset;
};

void report_race(const char* hazard, const Place& place, const Mark& other, uintptr_t pc) {
    report(Fault::kRace, pc, 0, "race: %s on %s memory %s+%zu by thread %d of block %ld, against thread %d of block %d",
           hazard, place.kind, place.name, place.offset, fiber->thread, block->number,
           static_cast<int>((other.thread - 1) % launch->threads), static_cast<int>((other.thread - 1) / launch->threads));
}

void note_read(Cell& cell, Mark now) {
    if (cell.read.thread) {
        const bool same_block = (cell.read.thread - 1) / launch->threads == (now.thread - 1) / launch->threads;
        if (!same_block) {
            cell.other = cell.read;
        } else if ((cell.read.thread != now.thread || cell.read.many) && !ordered(cell.read)) {
            const long before = (cell.read.thread - 1) % launch->threads, here = (now.thread - 1) % launch->threads;
            now.many = 1;
            now.warps = cell.read.warps || before / 32 != here / 32;
            now.warp_epoch = now.warp_epoch > cell.read.warp_epoch ? now.warp_epoch : cell.read.warp_epoch;
            now.atomic &= cell.read.atomic;
        }
    }
    cell.read = now;
}

// The cell of shared memory, if the access lies within a variable and within what the launch gave.
Cell* shared_cell(uintptr_t address, size_t size, bool writes, uintptr_t pc) {
    const size_t offset = address - reinterpret_cast<uintptr_t>(launch->shared_low);
    bool inside = false;
    for (size_t i = 0; i < launch->options.shared_count && !inside; ++i) {
        const size_t *variable = launch->options.shared_variables + 2 * i;
        inside = offset >= variable[0] && offset + size <= variable[0] + variable[1];
    }
    if (!inside) {
        report(Fault::kMemory, pc, 0, "out of bounds: %s of %zu bytes outside every shared variable; thread %d, block %ld",
               verb(writes), size, fiber->thread, block->number);
        fail();
    }
    const uintptr_t dynamic = reinterpret_cast<uintptr_t>(launch->dynamic_low);
    size_t room = 0;
    if (dynamic) launch->options.dynamic(&room);
    if (dynamic && address >= dynamic && address < dynamic + room && address + size > dynamic + launch->options.dynamic_bytes) {
        report(Fault::kMemory, pc, 0,
               "out of bounds: %s of %zu bytes at offset %zu of dynamic shared memory, of which the launch gave %u bytes; "
               "thread %d, block %ld",
               verb(writes), size, static_cast<size_t>(address - dynamic), launch->options.dynamic_bytes, fiber->thread,
               block->number);
        fail();
    }
    return &block->shadow[offset / kGranule];
}

[[noreturn]] void report_outside(uintptr_t address, size_t size, bool writes, uintptr_t pc) {
    const Allocation* near = below(address);
    std::string where = near ? std::to_string(address - near->high) + " bytes past the end of " + near->name
                             : "before all of it";
    report(Fault::kMemory, pc, 0, "out of bounds: %s of %zu bytes of global memory, %s; thread %d, block %ld", verb(writes),
           size, where.c_str(), fiber->thread, block->number);
    fail();
}

void report_stale(const Place& place, uintptr_t pc) {
    report(Fault::kRace, pc, 0, "read-only cache: %s+%zu is read through it and written in one launch; thread %d, block %ld",
           place.name, place.offset, fiber->thread, block->number);
}

} // namespace

void report(Fault fault, uintptr_t pc, int line, const char* format, ...) {
    if (reports.size() >= 64 || !reported.insert({fault, pc ? pc : line}).second) return;
    char text[512];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    reports.push_back({text, pc, line});
}

// What is no business of the checks: a thread's own variables, and those of the runtime.
bool is_private(uintptr_t address) {
    return address - reinterpret_cast<uintptr_t>(fiber->stack) < kStack ||
           address - reinterpret_cast<uintptr_t>(&cudacpu_here) < sizeof cudacpu_here;
}

void forget_reports() {
    reports.clear();
    reported.clear();
}

void forget_accesses() {
    released.clear();
    for (Allocation* memory : touched) {
        drop_shadow(*memory);
        memory->constant.clear();
        memset(memory->used, 0, sizeof memory->used);
    }
    touched.clear();
}

// What a launch remembers of single bytes is of no use after it; what it has used is.
void end_accesses() {
    for (Allocation* memory : touched) drop_shadow(*memory);
}

void check_access(uintptr_t address, size_t size, bool reads, bool writes, bool atomic, uintptr_t pc) {
    if (is_private(address)) return;
    Cell* cell;
    Allocation* memory = nullptr;
    Place place{"shared", "", 0};
    const uintptr_t shared = reinterpret_cast<uintptr_t>(launch->shared_low);
    const uintptr_t shared_end = reinterpret_cast<uintptr_t>(launch->shared_high);
    if (address >= shared && address < shared_end) {
        cell = shared_cell(address, size, writes, pc);
        place.offset = address - shared;
    } else if ((memory = find(address))) {
        if (address + size > memory->high) report_outside(address + size, size, writes, pc);
        place = {"global", memory->name.c_str(), address - memory->low};
        if (!memory->shadow) touch(*memory);
        if (reads) note_use(*memory, address, address + size, false);
        if (writes) note_use(*memory, address, address + size, true);
        cell = &memory->shadow[place.offset / kGranule];
        const int device = launch->options.device;
        if (device >= 0 && memory->device >= 0 && memory->device != device) {
            report(Fault::kMemory, pc, 0, "wrong device: %s of %s by device %d; thread %d, block %ld", verb(writes),
                   place.name, device, fiber->thread, block->number);
            fail();
        }
        if (writes && !memory->writable)
            report(Fault::kMemory, pc, 0, "write to read-only memory %s+%zu; thread %d, block %ld", place.name,
                   place.offset, fiber->thread, block->number);
    } else if (address >= reinterpret_cast<uintptr_t>(module_low) && address < reinterpret_cast<uintptr_t>(module_high)) {
        return; // constant memory, and the code's own tables
    } else {
        report_outside(address, size, writes, pc);
    }
    if (writes && !atomic && memory) fiber->unfenced = true;
    Mark now{};
    now.thread = block->number * launch->threads + fiber->thread + 1;
    now.atomic = atomic;
    now.epoch = block->epoch;
    now.warp_epoch = fiber->warp_epoch;
    now.releases = launch->releases[block->number].size();
    for (size_t done = 0; done < size; done += kGranule, ++cell) {
        uint8_t* unwritten = memory && memory->unwritten ? &memory->unwritten[(place.offset + done) / kGranule] : nullptr;
        if (reads && (memory ? unwritten && *unwritten : !cell->write.thread))
            report(Fault::kUninitialised, pc, 0, "uninitialised: read of %s memory %s+%zu, which nothing has written; "
                   "thread %d, block %ld", place.kind, place.name, place.offset, fiber->thread, block->number);
        if (cell->write.thread && !(atomic && cell->write.atomic) && !ordered(cell->write))
            report_race(writes ? "write after write" : "read after write", place, cell->write, pc);
        if (!writes) {
            note_read(*cell, now);
            continue;
        }
        for (const Mark& mark : {cell->read, cell->other})
            if (mark.thread && !(atomic && mark.atomic) && !ordered(mark)) report_race("write after read", place, mark, pc);
        *cell = Cell{now, {}, {}};
        if (memory && !memory->constant.empty() && memory->constant[place.offset + done]) report_stale(place, pc);
        if (unwritten) *unwritten = 0;
    }
}

// What lies in the read-only cache stays there, whoever writes to memory, until the launch ends.
void check_constant(uintptr_t address, size_t size, uintptr_t pc) {
    Allocation* memory = find(address);
    if (!memory || address + size > memory->high) return; // which the access itself tells
    if (!memory->shadow) touch(*memory);
    if (memory->constant.empty()) memory->constant.resize(granules(*memory));
    for (size_t at = address - memory->low; size--; ++at) {
        memory->constant[at] = true;
        if (memory->shadow[at].write.thread) report_stale({"global", memory->name.c_str(), at}, pc);
    }
}

void acquire(uintptr_t address) {
    auto found = released.find(address);
    if (found != released.end()) fiber->pending.join(found->second);
}

void release(uintptr_t address) {
    if (fiber->unfenced) return;
    std::vector<Release>& log = launch->releases[block->number];
    log.push_back({fiber->thread, block->epoch, fiber->warp_epoch});
    Clock& clock = released[address];
    clock.join(block->seen);
    clock.join(fiber->seen);
    clock.raise(block->number, log.size());
}

void release_all() {
    if (!launch->options.check) return;
    Clock all;
    for (size_t number = 0; number < launch->releases.size(); ++number) {
        launch->releases[number].push_back({kAllThreads, 0, 0});
        all.raise(number, launch->releases[number].size());
    }
    for (Block* each : launch->resident) each->seen = all;
}

extern "C" {

void cudacpu_memory_add(uintptr_t low, size_t bytes, int written, int writable, const char* name) {
    Allocation memory{low, low + bytes, nullptr, nullptr, writable != 0, name};
    if (!written) {
        memory.unwritten = static_cast<uint8_t*>(malloc(granules(memory)));
        memset(memory.unwritten, 1, granules(memory));
    }
    allocations[low] = memory;
}

void cudacpu_memory_device(uintptr_t low, int device) {
    auto found = allocations.find(low);
    if (found != allocations.end()) found->second.device = device;
}

void cudacpu_memory_remove(uintptr_t low) {
    auto found = allocations.find(low);
    if (found == allocations.end()) return;
    drop_shadow(found->second);
    touched.erase(std::remove(touched.begin(), touched.end(), &found->second), touched.end());
    free(found->second.unwritten);
    allocations.erase(found);
    last_found = nullptr;
}

// The first address of the allocation that an address is in, or 0.
uintptr_t cudacpu_memory_base(uintptr_t address) {
    Allocation* memory = below(address);
    return memory && address < memory->high ? memory->low : 0;
}

const char* cudacpu_memory_name(uintptr_t address) {
    Allocation* memory = below(address);
    return memory ? memory->name.c_str() : "";
}

// Of the last launch: an allocation that it has used, from where to where it has read, and written. 0: there are no more.
int cudacpu_touched(int number, uintptr_t* bounds) {
    if (static_cast<size_t>(number) >= touched.size()) return 0;
    bounds[0] = touched[number]->low;
    memcpy(bounds + 1, touched[number]->used, sizeof touched[number]->used);
    return 1;
}

// The host, or a copy, wrote there.
void cudacpu_memory_written(uintptr_t address, size_t bytes) {
    Allocation* memory = below(address);
    if (memory && memory->unwritten && address < memory->high)
        memset(memory->unwritten + (address - memory->low) / kGranule, 0, (bytes + kGranule - 1) / kGranule);
}

int cudacpu_reports() { return static_cast<int>(reports.size()); }

// A report's text; its place as an offset in the library, or 0, and as a line, or 0.
const char* cudacpu_report(int number, uintptr_t* offset, int* line) {
    const Report& one = reports[number];
    *offset = one.pc ? one.pc - reinterpret_cast<uintptr_t>(module_low) : 0;
    *line = one.line;
    return one.text.c_str();
}

} // extern "C"
