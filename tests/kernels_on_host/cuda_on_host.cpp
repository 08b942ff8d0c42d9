// The fibers and checks behind cuda_on_host.h; built once for all kernels.
#include "cuda_on_host.h"

#include <algorithm>
#include <csetjmp>
#include <cstdarg>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace on_host {

int flags, current;

constexpr size_t STACK = 64 << 10;
constexpr int MOST_THREADS = 1024;
constexpr uint64_t GRANULE = 2;  // bytes whose accesses are remembered together
constexpr uint64_t SECTOR = 32;

// ---------------------------------------------------------------------- threads

struct Thread {
    ucontext_t begin;
    jmp_buf where;
    bool started, ended;
    const char* waits_in;  // nullptr: it can go on
    unsigned mask;
    int source;
    uint32_t value;
    std::vector<std::pair<void*, int>> sites;  // how often it has been at each load and store
};

Thread threads[MOST_THREADS];
char* stacks = nullptr;
jmp_buf scheduler;
int thread_count, block_number;
const char* kernel_name;
void (*body)();

bool failed;
char* error_text;
size_t error_size;

std::pair<unsigned, unsigned> place(int thread) { return {thread % blockDim.x, thread / blockDim.x}; }

[[gnu::format(printf, 1, 2)]] void report(const char* format, ...) {
    if (failed) return;
    failed = true;
    int length = std::snprintf(error_text, error_size, "%s: ", kernel_name);
    va_list values;
    va_start(values, format);
    std::vsnprintf(error_text + length, error_size - length, format, values);
    va_end(values);
}

#define ON_HOST_THREAD(t) on_host::place(t).first, on_host::place(t).second

[[gnu::noinline]] void leave() { _longjmp(scheduler, 1); }

[[gnu::noinline]] void yield() {
    if (_setjmp(threads[current].where) == 0) leave();
}

void enter() {
    body();
    threads[current].ended = true;
    leave();
}

[[gnu::noinline]] void resume(int thread) {
    current = thread;
    threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / (blockDim.x * blockDim.y)};
    if (_setjmp(scheduler) != 0) return;
    Thread& t = threads[thread];
    if (t.started) _longjmp(t.where, 1);
    t.started = true;
    setcontext(&t.begin);
}

const char* state(const Thread& t) { return t.ended ? "has ended" : t.waits_in ? t.waits_in : "runs"; }

// Lets the lanes of a warp go on whose shuffle all lanes of their mask have reached.
bool release_lanes(int first) {
    int lanes = std::min(LANES, thread_count - first);
    bool any = false;
    for (int lane = 0; lane < lanes; ++lane) {
        Thread& t = threads[first + lane];
        if (!t.waits_in || !t.mask) continue;
        if (!(t.mask >> lane & 1)) {
            report("block %d, thread (%u, %u): %s with a mask that it is not in", block_number,
                   ON_HOST_THREAD(first + lane), t.waits_in);
            return false;
        }
        uint32_t values[LANES] = {};
        bool all = true;
        for (int other = 0; other < LANES; ++other) {
            if (!(t.mask >> other & 1)) continue;
            const Thread* o = other < lanes ? &threads[first + other] : nullptr;
            all &= o && o->waits_in == t.waits_in && o->mask == t.mask;
            if (o) values[other] = o->value;
        }
        if (!all) continue;
        for (int other = 0; other < lanes; ++other)
            if (t.mask >> other & 1) threads[first + other].waits_in = nullptr;
        for (int other = 0; other < lanes; ++other) {
            Thread& o = threads[first + other];
            if (t.mask >> other & 1 && o.source >= 0 && o.source < LANES) o.value = values[o.source];
        }
        any = true;
    }
    return any;
}

int epoch;  // counts the barriers of a block

// Whether the block has ended; reports what stands still.
bool run_block(bool reverse) {
    bool moved = false;
    int ended = 0, at_barrier = 0;
    for (int i = 0; i < thread_count && !failed; ++i) {
        int thread = reverse ? thread_count - 1 - i : i;
        if (threads[thread].ended || threads[thread].waits_in) continue;
        resume(thread);
        moved = true;
    }
    for (int first = 0; first < thread_count && !failed; first += LANES) moved |= release_lanes(first);
    for (int thread = 0; thread < thread_count; ++thread) {
        ended += threads[thread].ended;
        at_barrier += threads[thread].waits_in && !threads[thread].mask;
    }
    if (failed || ended == thread_count) return true;
    if (at_barrier == thread_count) {
        ++epoch;
        for (int thread = 0; thread < thread_count; ++thread) threads[thread].waits_in = nullptr;
    } else if (!moved) {
        int waits = 0, other = 0;  // a lane that waits for others of its warp says more than a thread at the barrier
        while (waits < thread_count && !(threads[waits].waits_in && threads[waits].mask)) ++waits;
        if (waits == thread_count)
            for (waits = 0; !threads[waits].waits_in;) ++waits;
        else
            other = waits / LANES * LANES;
        while (threads[other].waits_in == threads[waits].waits_in && threads[other].mask == threads[waits].mask &&
               other + 1 < thread_count)
            ++other;
        report("block %d: thread (%u, %u) waits in %s (mask %08x), which not all of its threads reach: thread (%u, %u) %s",
               block_number, ON_HOST_THREAD(waits), threads[waits].waits_in, threads[waits].mask,
               ON_HOST_THREAD(other), state(threads[other]));
        return true;
    }
    return false;
}

uint32_t exchange(const char* operation, unsigned mask, uint32_t value, int source) {
    Thread& t = threads[current];
    t.waits_in = operation, t.mask = mask, t.value = value, t.source = source;
    yield();
    return threads[current].value;
}

// ---------------------------------------------------------------------- memory

struct Access {  // the last write to a granule, and its reads since
    int write_block = -1, write_thread = -1, write_epoch = -1;
    int read_block = -1, read_thread = -1, read_epoch = -1;
    bool read_by_threads = false, read_by_blocks = false, atomic = false;
};

constexpr uint64_t PAGE = 4096;
using Page = std::vector<Access>;

std::unordered_map<uint64_t, Page> shadow;  // of global memory
uint64_t last_page;
Page* last_accesses;
Page shared_accesses;
std::vector<uint64_t> shared_memory;
size_t shared_bytes;

void* shared_begin() { return shared_memory.data(); }

const Buffer* buffers;
int buffer_count;
Counts* counts;
struct Key {
    int warp;
    void* site;
    int time;
    bool operator<(const Key& o) const { return std::tie(warp, site, time) < std::tie(o.warp, o.site, o.time); }
};
struct WarpAccess {
    int buffer;
    bool write;
    std::vector<uint64_t> sectors;
};
std::map<Key, WarpAccess> warp_accesses;  // of a block

void race(const char* where, uint64_t offset, int other_block, int other_thread, const char* other, const char* mine) {
    report("race: block %d, thread (%u, %u) %s byte %llu of %s, which block %d, thread (%u, %u) %s, with no barrier between",
           block_number, ON_HOST_THREAD(current), mine, (unsigned long long)offset, where, other_block,
           ON_HOST_THREAD(other_thread), other);
}

void remember(Access& a, bool write, bool atomic, const char* where, uint64_t offset) {
    bool written_beside = a.write_block >= 0 && (a.write_block != block_number ||
                                                 (a.write_epoch == epoch && a.write_thread != current));
    if (written_beside && !(atomic && a.atomic))
        race(where, offset, a.write_block, a.write_thread, "writes", write ? "writes" : "reads");
    if (write) {
        bool read_beside = a.read_block >= 0 && (a.read_block != block_number || a.read_by_blocks ||
                                                 (a.read_epoch == epoch && (a.read_thread != current || a.read_by_threads)));
        if (read_beside) race(where, offset, a.read_block, a.read_thread, "reads", "writes");
        a.write_block = block_number, a.write_thread = current, a.write_epoch = epoch, a.atomic = atomic;
        return;
    }
    a.read_by_blocks |= a.read_block >= 0 && a.read_block != block_number;
    bool again = a.read_block == block_number && a.read_epoch == epoch;
    a.read_by_threads = again && (a.read_by_threads || a.read_thread != current);
    a.read_block = block_number, a.read_thread = current, a.read_epoch = epoch;
}

Access& access_of(uint64_t address) {
    uint64_t page = address / PAGE;
    if (!last_accesses || page != last_page) {
        Page& accesses = shadow[page];
        if (accesses.empty()) accesses.resize(PAGE / GRANULE);
        last_page = page, last_accesses = &accesses;
    }
    return (*last_accesses)[address % PAGE / GRANULE];
}

[[gnu::noinline]] void on_global(uint64_t address, int bytes, bool write) {
    void* site = __builtin_return_address(0);
    int which = 0;
    while (which < buffer_count && (address < buffers[which].address ||
                                    address + bytes > buffers[which].address + buffers[which].bytes))
        ++which;
    const char* does = write ? "writes" : "reads";
    if (which == buffer_count) {
        report("block %d, thread (%u, %u) %s %d bytes at %#llx, outside all buffers", block_number,
               ON_HOST_THREAD(current), does, bytes, (unsigned long long)address);
        leave();
    }
    uint64_t offset = address - buffers[which].address;
    char where[32];
    std::snprintf(where, sizeof where, "buffer %d", which);
    if (address % bytes)
        report("block %d, thread (%u, %u) %s %d bytes at byte %llu of %s, which is misaligned", block_number,
               ON_HOST_THREAD(current), does, bytes, (unsigned long long)offset, where);
    if (write && !buffers[which].writable)
        report("block %d, thread (%u, %u) writes byte %llu of %s, which is read only", block_number,
               ON_HOST_THREAD(current), (unsigned long long)offset, where);
    for (uint64_t byte = 0; byte < (uint64_t)bytes && !failed; byte += GRANULE)
        remember(access_of(address + byte), write, false, where, offset + byte);
    if (failed) leave();
    Counts& c = counts[which];
    c.bytes[write] += bytes;
    ++c.accesses[write][__builtin_ctz(bytes)];
    if (!(flags & COUNT)) return;
    auto& sites = threads[current].sites;
    auto found = std::find_if(sites.begin(), sites.end(), [=](auto& s) { return s.first == site; });
    if (found == sites.end()) found = sites.insert(sites.end(), {site, 0});
    WarpAccess& access = warp_accesses[{current / LANES, site, found->second++}];
    access.buffer = which, access.write = write;
    for (uint64_t s = address / SECTOR; s <= (address + bytes - 1) / SECTOR; ++s) access.sectors.push_back(s);
}

void count_warp_accesses() {
    for (auto& [key, access] : warp_accesses) {
        std::sort(access.sectors.begin(), access.sectors.end());
        auto end = std::unique(access.sectors.begin(), access.sectors.end());
        ++counts[access.buffer].warp_accesses[access.write];
        counts[access.buffer].sectors[access.write] += end - access.sectors.begin();
    }
    warp_accesses.clear();
}

[[gnu::noinline]] void on_shared(uint64_t address, int bytes, bool write, bool atomic) {
    uint64_t offset = address - (uint64_t)shared_memory.data();
    const char* does = write ? "writes" : "reads";
    if (offset + bytes > shared_bytes || offset % bytes) {
        report("block %d, thread (%u, %u) %s %d bytes at byte %lld of shared memory, which has %zu bytes%s", block_number,
               ON_HOST_THREAD(current), does, bytes, (long long)offset, shared_bytes,
               offset % bytes ? " (misaligned)" : "");
        leave();
    }
    for (uint64_t byte = 0; byte < (uint64_t)bytes && !failed; byte += GRANULE) {
        Access& a = shared_accesses[(offset + byte) / GRANULE];
        if ((!write || atomic) && a.write_block != block_number)
            report("block %d, thread (%u, %u) reads byte %llu of shared memory, which nobody has written", block_number,
                   ON_HOST_THREAD(current), (unsigned long long)(offset + byte));
        else
            remember(a, write, atomic, "shared memory", offset + byte);
    }
    if (failed) leave();
}

// ---------------------------------------------------------------------- launch

bool begin_block() {
    std::fill(shared_memory.begin(), shared_memory.end(), 0x7fc0dead7fc0deadull);
    shared_accesses.assign(shared_bytes / GRANULE + 1, Access());
    epoch = 0;
    for (int i = 0; i < thread_count; ++i) {
        Thread& t = threads[i];
        t.started = t.ended = false;
        t.waits_in = nullptr;
        t.mask = 0;
        t.sites.clear();
        if (getcontext(&t.begin) != 0) return false;
        t.begin.uc_stack.ss_sp = stacks + STACK * i;
        t.begin.uc_stack.ss_size = STACK;
        t.begin.uc_link = nullptr;
        makecontext(&t.begin, enter, 0);
    }
    return true;
}

int run(void (*body_)(), const Launch& launch) {
    kernel_name = launch.name, error_text = launch.error, error_size = launch.error_size, failed = false, body = body_;
    const unsigned *grid = launch.grid, *block = launch.block;
    buffers = launch.buffers, buffer_count = launch.buffer_count, flags = launch.flags, counts = launch.counts;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    thread_count = block[0] * block[1] * block[2];
    if (thread_count < 1 || thread_count > MOST_THREADS) {
        report("%d threads in a block, expected 1 to %d", thread_count, MOST_THREADS);
        return 1;
    }
    if (!stacks) {
        void* memory = mmap(nullptr, STACK * MOST_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            report("no memory for the threads' stacks");
            return 1;
        }
        stacks = static_cast<char*>(memory);
    }
    shared_bytes = launch.shared_bytes;
    shared_memory.assign(shared_bytes / 8 + 3, 0);
    shadow.clear();
    last_accesses = nullptr;
    warp_accesses.clear();
    int64_t blocks = (int64_t)grid[0] * grid[1] * grid[2];
    for (int64_t i = 0; i < blocks && !failed; ++i) {
        block_number = (int)(flags & REVERSE ? blocks - 1 - i : i);
        blockIdx = {block_number % grid[0], block_number / grid[0] % grid[1], block_number / (grid[0] * grid[1])};
        if (!begin_block()) report("a thread cannot be made");
        while (!failed && !run_block(flags & REVERSE)) {
        }
        if (flags & COUNT) count_warp_accesses();
    }
    return failed;
}

}  // namespace on_host
