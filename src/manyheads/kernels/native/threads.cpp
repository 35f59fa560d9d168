// Which build this processor runs, and the threads that run it.
//
// The threads are those of PyTorch's own OpenMP, found in the process rather than linked, so that there is one
// pool, and no second pool waits beside it. That pool doesn't live on in a forked child: there, and where PyTorch has
// another one, a call starts threads of its own.
#include "problem.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <pthread.h>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define BUILD(width)                                                  \
    void attend_##width(const Problem *p, const Look *look);           \
    int differentiate_##width(const Problem *p, const Gradient *y);   \
    void scores_##width(const Problem *p, void *to);

void attend_float64(const Problem *p, const Look *look);
int differentiate_float64(const Problem *p, const Gradient *y);
void scores_float64(const Problem *p, void *to);
BUILD(portable)
BUILD(avx2)
BUILD(avx512)
BUILD(avx512bf16)
BUILD(amx)
// setup.py says which of the wider ones it could build: IF_avx2(x) is x where there is that build, else 0.
#define EACH(what)                                                                    \
    {what##_portable, IF_avx2(what##_avx2), IF_avx512(what##_avx512), IF_avx512bf16(what##_avx512bf16), \
     IF_amx(what##_amx)}

// -- memory ----------------------------------------------------------------------------------------

namespace {

constexpr int64_t HUGE_PAGE = 1 << 21, KEPT = 64 << 20;  // bytes: what is larger isn't kept between calls

struct Memory {
    void *at = nullptr;
    int64_t size = 0;
    void *get(int64_t bytes) {
        if (bytes <= size) return at;
        drop();
        int64_t whole = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        at = aligned_alloc(HUGE_PAGE, whole);
        if (!at) throw std::bad_alloc();
        size = whole;
#if defined(__linux__)
        madvise(at, size, MADV_HUGEPAGE);
#endif
        return at;
    }
    void drop() {
        free(at);
        at = nullptr;
        size = 0;
    }
    ~Memory() { free(at); }
};

thread_local Memory first, second;

}  // namespace

void *scratch(int64_t bytes) { return first.get(bytes); }
void *store_of(int64_t bytes) { return second.get(bytes); }
void forget() {
    if (second.size > KEPT) second.drop();
}

// -- what the machine has --------------------------------------------------------------------------

namespace {

int64_t second_level = 1 << 20;  // bytes of a core's cache; many have so much where the system doesn't say

void read_caches() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
    long size = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (size > 0) second_level = size;
#endif
}

// Does the processor multiply bfloat16 in tiles (AMX), and does the system save them?
bool has_tiles() {
#if defined(__x86_64__)
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;  // AMX-BF16, -TILE
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low >> 17 & 3) == 3;  // tile configuration and data
#else
    return false;
#endif
}

// May this process use tiles? Linux asks every process to ask for them, once; others don't.
bool may_use_tiles() {
#if defined(EMULATE_TILES)
    return true;
#elif defined(__linux__) && defined(__x86_64__)
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    static const bool allowed = has_tiles() && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return allowed;
#else
    return has_tiles();
#endif
}

}  // namespace

int64_t near_cache() { return second_level; }

// -- threads ---------------------------------------------------------------------------------------

namespace {

typedef void (*Fork)(void (*)(void *), void *, unsigned, unsigned);  // libgomp's GOMP_parallel

Fork pool = nullptr;
bool forked = false;

#if defined(__linux__)
int look(dl_phdr_info *info, size_t, void *found) {
    const char *name = info->dlpi_name;
    if (!strstr(name, "libgomp")) return 0;
    void *library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return 0;
    *(Fork *)found = (Fork)dlsym(library, "GOMP_parallel");
    return strstr(name, "torch") != nullptr;  // PyTorch's own, where there are several
}
#endif

}  // namespace

void parallel(int64_t threads, void (*work)(void *), void *data) {
    if (threads <= 1) return work(data);
    if (pool && !forked) return pool(work, data, (unsigned)threads, 0);
    std::vector<std::thread> others;
    try {
        for (int64_t n = 1; n < threads; n++) others.emplace_back(work, data);
    } catch (const std::system_error &) {
        // No more threads to be had: those there are do it all.
    }
    work(data);
    for (std::thread &one : others) one.join();
}

#if defined(TIMED)
double part_seconds[PARTS];
#endif

// -- what Python calls -----------------------------------------------------------------------------

extern "C" {

// Looks for PyTorch's pool, unless this process shouldn't use it. True if it is found.
__attribute__((visibility("default"))) int manyheads_begin(int own_threads) {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    read_caches();
#if defined(__linux__)
    if (!own_threads) dl_iterate_phdr(look, &pool);
#endif
    (void)own_threads;
    return pool != nullptr;
}

__attribute__((visibility("default"))) int64_t manyheads_interface() {
    return ((INTERFACE * 1000 + sizeof(Look)) * 1000 + sizeof(Gradient)) * 1000 + sizeof(Problem);
}

// Is a build here, and can this processor run it? By its number: 0 portable, 1 avx2, 2 avx512, 3 avx512bf16, 4 amx.
__attribute__((visibility("default"))) int manyheads_runs(int level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    [[maybe_unused]] bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    [[maybe_unused]] bool pairs = avx512 && __builtin_cpu_supports("avx512bf16");
#if defined(EMULATE_TILES)
    pairs = avx2;
#endif
    bool levels[] = {true, IF_avx2(avx2), IF_avx512(avx512), IF_avx512bf16(pairs), IF_amx(pairs && may_use_tiles())};
    return levels[level];
#else
    return level == 0;
#endif
}

// Does this processor multiply bfloat16 in tiles (AMX)? 0: no; 1: it does, but Linux doesn't let this process; 2: yes.
__attribute__((visibility("default"))) int manyheads_tiles() { return has_tiles() ? 1 + may_use_tiles() : 0; }

// Computes a problem by a build, with a look at its weights (null: none). 0: done; 1: there is no memory for the packed
// keys and values.
__attribute__((visibility("default"))) int manyheads_attend(const Problem *p, const Look *look, int level) {
    void (*builds[])(const Problem *, const Look *) = EACH(attend);
    try {
        p->dtype == FLOAT64 ? attend_float64(p, look) : builds[level](p, look);
    } catch (const std::bad_alloc &) {
        return 1;
    }
    return 0;
}

// scale · q·k with softcap of all queries and keys, into [b, h, t, s], contiguous; of a problem's mask, bias, values and
// output nothing is read. 0: done; 1: there is no memory for a panel of keys.
__attribute__((visibility("default"))) int manyheads_scores(const Problem *p, void *to, int level) {
    void (*builds[])(const Problem *, void *) = EACH(scores);
    try {
        p->dtype == FLOAT64 ? scores_float64(p, to) : builds[level](p, to);
    } catch (const std::bad_alloc &) {
        return 1;
    }
    return 0;
}

// Its gradient. 0: done; 1: there is no memory for what is packed and summed; 2: some number isn't finite.
__attribute__((visibility("default"))) int manyheads_differentiate(const Problem *p, const Gradient *y, int level) {
    int (*builds[])(const Problem *, const Gradient *) = EACH(differentiate);
    try {
        return p->dtype == FLOAT64 ? differentiate_float64(p, y) : builds[level](p, y);
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

#if defined(TIMED)
// Seconds of each `Part` since the last call.
__attribute__((visibility("default"))) void manyheads_parts(double *seconds) {
    for (int part = 0; part < PARTS; part++) seconds[part] = part_seconds[part], part_seconds[part] = 0;
}
#endif

}  // extern "C"
