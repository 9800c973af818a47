// The scheduler of simt.h. Compiled once per module: KERNEL_FILE is the expanded kernel source,
// SIMT_KERNELS a list SIMT(name) SIMT(name) ... of what it defines.
#include "simt.h"

#include <csetjmp>
#include <ucontext.h>
#include <vector>

#include KERNEL_FILE

namespace simt {

enum State : unsigned char { READY, AT_BARRIER, ENDED };

struct Fiber {
    uint3 thread;
    unsigned lane, warp, meetings;
    State state;
    bool started;
    jmp_buf place;
    ucontext_t context;
};

static const size_t STACK = 64 << 10;

Fiber* current;
uint3 thread_index, block_index;
dim3 block_size, grid_size;
unsigned lane, progress;

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::vector<char> stacks;
static std::vector<unsigned> order;
static unsigned at_barrier, ended, random_state;
static std::string failure;
static void (*kernel_body)(void*);
static void* kernel_argument;

// Sanitizers follow swapcontext(); the jumps are several times as fast.
#ifdef SIMT_CONTEXTS
static ucontext_t scheduler;
static void leave() { swapcontext(&current->context, &scheduler); }
static void enter(Fiber* fiber) { swapcontext(&scheduler, &fiber->context); }
#else
static jmp_buf scheduler;
static void leave() {
    if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}
static void enter(Fiber* fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber->started) _longjmp(fiber->place, 1);
    fiber->started = true;
    setcontext(&fiber->context);
}
#endif

Warp& warp() { return warps[current->warp]; }
unsigned next_phase() { return current->meetings++ & 1; }
void pause() { leave(); }

void barrier() {
    current->state = AT_BARRIER;
    at_barrier++;
    progress++;
    while (current->state == AT_BARRIER) leave();
}

void fail(const char* reason) {
    char text[256];
    snprintf(text, sizeof text, "%s: block (%u, %u, %u), thread (%u, %u, %u)", reason, block_index.x,
             block_index.y, block_index.z, thread_index.x, thread_index.y, thread_index.z);
    failure = text;
    current->state = ENDED;
    for (;;) leave();
}

static void run_fiber() {
    kernel_body(kernel_argument);
    current->state = ENDED;
    ended++;
    progress++;
    for (;;) leave();
}

static void resume(Fiber* fiber) {
    current = fiber;
    thread_index = fiber->thread;
    lane = fiber->lane;
    enter(fiber);
}

static unsigned random_below(unsigned n) {
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

static void prepare(unsigned count, unsigned seed) {
    for (unsigned i = 0; i < count; i++) {
        Fiber& f = fibers[i];
        f.thread = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
        f.lane = i & 31;
        f.warp = i >> 5;
        f.state = READY;
        f.started = false;
        f.meetings = 0;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = &stacks[i * STACK];
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, run_fiber, 0);
        order[i] = seed == 1 ? count - 1 - i : i;
    }
    if (seed > 1)
        for (unsigned i = count - 1; i > 0; i--) std::swap(order[i], order[random_below(i + 1)]);
    memset(warps.data(), 0, warps.size() * sizeof(Warp));
    at_barrier = ended = 0;
}

// Seed 0: the threads take turns in ascending order. Otherwise a warp runs as far as it can before
// the next one starts, so that a missing barrier shows.
static void sweep(unsigned count, unsigned seed) {
    unsigned groups = seed == 0 ? 1 : (unsigned)warps.size();
    for (unsigned k = 0; k < groups; k++) {
        unsigned chosen = seed == 1 ? groups - 1 - k : (k + seed) % groups, before;
        do {
            before = progress;
            for (unsigned i = 0; i < count && failure.empty(); i++) {
                Fiber* fiber = &fibers[order[i]];
                if (fiber->state == READY && (seed == 0 || fiber->warp == chosen)) resume(fiber);
            }
        } while (seed != 0 && progress != before && failure.empty());
    }
}

static void run_block(unsigned count, unsigned seed) {
    prepare(count, seed);
    while (ended < count && failure.empty()) {
        unsigned before = progress;
        sweep(count, seed);
        if (!failure.empty()) return;
        if (at_barrier && at_barrier + ended == count) {
            if (ended) failure = "__syncthreads() is not reached by threads that ended";
            at_barrier = 0;
            for (Fiber& fiber : fibers) fiber.state = fiber.state == AT_BARRIER ? READY : fiber.state;
            progress++;
        }
        if (progress == before) failure = "a collective or barrier waits for a thread that never comes";
    }
}

std::string launch(dim3 grid, dim3 block, unsigned seed, void (*body)(void*), void* argument) {
    unsigned count = block.x * block.y * block.z, blocks = grid.x * grid.y * grid.z;
    if (count == 0 || count > 1024 || block.z > 64) return "no such block";
    if (blocks == 0 || grid.y > 65535 || grid.z > 65535) return "no such grid";
    block_size = block;
    grid_size = grid;
    kernel_body = body;
    kernel_argument = argument;
    random_state = seed;
    failure.clear();
    fibers.resize(count);
    warps.resize((count + 31) / 32);
    order.resize(count);
    if (stacks.size() < count * STACK) stacks.resize(count * STACK);
    for (unsigned i = 0; i < blocks && failure.empty(); i++) {
        unsigned b = seed == 1 ? blocks - 1 - i : i;
        block_index = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
        run_block(count, seed);
    }
    return failure;
}

static std::vector<Entry>& table() {
#define SIMT(kernel) entry(#kernel, kernel),
    static std::vector<Entry> entries = {SIMT_KERNELS};
    return entries;
}

}  // namespace simt

/// The letters of a kernel's parameters, or null if there is no such kernel.
extern "C" const char* simt_signature(const char* name) {
    for (simt::Entry& e : simt::table())
        if (strcmp(e.name, name) == 0) return e.signature.c_str();
    return nullptr;
}

/// Runs a kernel; sizes are x, y, z. Returns "" or what went wrong.
extern "C" const char* simt_run(const char* name, const unsigned* grid, const unsigned* block,
                                unsigned seed, void** arguments) {
    static std::string result;
    for (simt::Entry& e : simt::table())
        if (strcmp(e.name, name) == 0) {
            result = e.run(e.kernel, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, seed,
                           arguments);
            return result.c_str();
        }
    return "no such kernel";
}
