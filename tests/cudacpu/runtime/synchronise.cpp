// What threads wait for each other with: barriers of a block, operations of a warp, the barrier of the grid, fences,
// atomics, and loads that may be polling.
#include "state.h"

namespace {

// What all threads knew by a barrier, they all know after it.
void share_knowledge(Block& owner) {
    bool unfenced = false;
    for (Fiber& each : owner.fibers) {
        unfenced |= each.unfenced;
        owner.pending.join(each.pending);
        owner.seen.join(each.seen);
        each.pending.known.clear();
        each.seen.known.clear();
        each.warp_epoch = 0;
    }
    for (Fiber& each : owner.fibers) each.unfenced = unfenced;
    if (++owner.epoch >> 20) report(Fault::kBarrier, 0, 0, "more than a million barriers in one block cannot be checked");
}

void open_barrier() {
    block->at_barrier = 0;
    share_knowledge(*block);
    progress();
    for (Fiber& each : block->fibers)
        if (each.state == State::kBarrier) wake(each);
}

void arrive(int line) {
    fiber->line = line;
    if (block->at_barrier == 0) block->barrier_line = line;
    if (block->barrier_line != line)
        report(Fault::kBarrier, 0, line, "divergent barrier: threads of block %ld wait at line %d while thread %d is here",
               block->number, block->barrier_line, fiber->thread);
    if (++block->at_barrier == block->alive) {
        open_barrier();
        if (launch->options.random) give_up_turn(false);
    } else {
        fiber->state = State::kBarrier;
        wait_here();
    }
}

int lane_source(const WarpCall& call, int lane) {
    const int width = static_cast<int>(call.width), first = lane & ~(width - 1);
    int source = lane;
    if (call.operation == kShuffle) return first + (call.source & (width - 1));
    if (call.operation == kShuffleUp) source = lane - call.source;
    if (call.operation == kShuffleDown) source = lane + call.source;
    if (call.operation == kShuffleXor) source = lane ^ call.source;
    return source < first || source >= first + width ? lane : source;
}

// All lanes of a mask have arrived: each gets its result.
void finish_warp(Fiber* warp, int lanes, unsigned mask, int line) {
    uint64_t ballot = 0;
    bool unfenced = false;
    Clock pending, seen;
    for (int lane = 0; lane < lanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        ballot |= (warp[lane].call.value & 1) << lane;
        unfenced |= warp[lane].unfenced;
        pending.join(warp[lane].pending);
        seen.join(warp[lane].seen);
    }
    for (int lane = 0; lane < lanes; ++lane) {
        if (!(mask >> lane & 1)) continue;
        WarpCall& call = warp[lane].call;
        if (call.operation == kBallot) {
            call.result = ballot;
        } else if (call.operation == kSyncWarp) {
            if (warp[lane].warp_epoch < 4095) ++warp[lane].warp_epoch;
            warp[lane].unfenced = unfenced;
            warp[lane].pending = pending;
            warp[lane].seen = seen;
        } else {
            const int source = lane_source(call, lane);
            if (source < lanes && (mask >> source & 1)) {
                call.result = warp[source].call.value;
            } else {
                report(Fault::kMask, 0, line, "lane %d reads lane %d, which is not in mask %08x", lane, source, mask);
                call.result = 0x7fc0dead7fc0deadu;
            }
        }
        if (&warp[lane] != fiber) wake(warp[lane]);
    }
    progress();
}

} // namespace

void thread_left() {
    if (block->alive && block->at_barrier == block->alive) open_barrier();
}

void release_grid() {
    for (Block* each : launch->resident) {
        each->at_grid = 0;
        share_knowledge(*each);
        for (Fiber& sleeper : each->fibers) {
            if (sleeper.state != State::kGrid) continue;
            sleeper.state = State::kReady;
            each->ready.push_back(sleeper.thread);
        }
    }
    release_all();
    progress();
}

extern "C" {

void cudacpu_syncthreads(int line) { arrive(line); }

int cudacpu_syncthreads_vote(int line, int operation, int predicate) {
    arrive(line);
    ++block->votes[predicate ? 1 : 0];
    arrive(line);
    const int yes = block->votes[1], no = block->votes[0];
    arrive(line);
    block->votes[0] = block->votes[1] = 0;
    arrive(line);
    return operation == kVoteCount ? yes : operation == kVoteAll ? no == 0 : yes > 0;
}

unsigned cudacpu_activemask() {
    const int first = fiber->thread & ~31;
    unsigned mask = 0;
    for (int lane = 0; lane < 32 && first + lane < launch->threads; ++lane)
        if (block->fibers[first + lane].state != State::kDone) mask |= 1u << lane;
    return mask;
}

uint64_t cudacpu_warp(int line, int operation, unsigned mask, uint64_t value, int source, unsigned width) {
    const int lane = fiber->thread & 31, first = fiber->thread & ~31;
    const int lanes = launch->threads - first < 32 ? launch->threads - first : 32;
    Fiber* warp = &block->fibers[first];
    if (!(mask >> lane & 1)) {
        report(Fault::kMask, 0, line, "thread %d calls a warp operation with mask %08x, which omits its own lane",
               fiber->thread, mask);
        fail();
    }
    fiber->line = line;
    fiber->state = State::kWarp;
    fiber->call = {operation, source, mask, width, value, 0};
    bool complete = true;
    for (int other = 0; other < lanes; ++other) {
        if (!(mask >> other & 1)) continue;
        if (warp[other].state == State::kDone) {
            report(Fault::kMask, 0, line, "mask %08x names lane %d, which has ended (block %ld, warp %d)", mask, other,
                   block->number, first / 32);
            fail();
        }
        const WarpCall& call = warp[other].call;
        complete &= warp[other].state == State::kWarp && warp[other].line == line && call.mask == mask &&
                    call.operation == operation;
    }
    if (!complete) {
        wait_here();
    } else {
        finish_warp(warp, lanes, mask, line);
        fiber->state = State::kReady;
        if (launch->options.random) give_up_turn(false);
    }
    return fiber->call.result;
}

void cudacpu_gridsync(int line) {
    if (!launch->options.cooperative) {
        report(Fault::kBarrier, 0, line, "grid synchronisation in a launch that is not cooperative");
        fail();
    }
    fiber->line = line;
    fiber->state = State::kGrid;
    ++block->at_grid;
    wait_here();
}

void cudacpu_fence() {
    fiber->unfenced = false;
    fiber->seen.join(fiber->pending);
    fiber->seen.join(block->pending);
}

void cudacpu_before_atomic(const volatile void* address, size_t size, void* caller) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    const bool interleave = launch->options.random || launch->options.check;
    give_up_turn(interleave ? random_number() % 2 == 0 : false);
    if (!launch->options.check) return;
    check_access(at, size, true, true, true, reinterpret_cast<uintptr_t>(caller));
    acquire(at);
    release(at);
}

void cudacpu_after_atomic(int changed) {
    if (changed) progress();
}

void cudacpu_poll(int certainly) {
    if (certainly || ++launch->turn_points % 256 == 0) give_up_turn(true);
}

void cudacpu_trap(int line) {
    report(Fault::kDeadlock, 0, line, "__trap() in thread %d of block %ld", fiber->thread, block->number);
    fail();
}

} // extern "C"
