// The functions that Python calls: they choose the build for this processor, and the threads that run it.
//
// The threads are those of PyTorch's OpenMP. It is found in the process rather than linked, so that there is only one pool.
// A forked child doesn't have this pool. There, and if PyTorch uses a different pool, each call starts its own threads.
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

#define BUILD(name)                                                             \
    void attend_##name(const Problem *problem, const Statistics *statistics);   \
    int differentiate_##name(const Problem *problem, const Gradient *gradient); \
    void scores_##name(const Problem *problem, void *to);
BUILD(float64)
BUILD(portable)
BUILD(avx2)
BUILD(avx512)
BUILD(avx512bf16)
BUILD(amx)
// setup.py defines which of the wider builds exist: IF_avx2(x) is x if that build exists, else 0.
#define EACH(what)                                                                                      \
    {what##_portable, IF_avx2(what##_avx2), IF_avx512(what##_avx512), IF_avx512bf16(what##_avx512bf16), \
     IF_amx(what##_amx)}

// -- memory ----------------------------------------------------------------------------------------

namespace {

constexpr int64_t HUGE_PAGE = 1 << 21, KEPT = 64 << 20;  // bytes: larger memory isn't kept between calls

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
void *call_storage(int64_t bytes) { return second.get(bytes); }
void release_storage() {
    if (second.size > KEPT) second.drop();
}

// -- properties of the machine ---------------------------------------------------------------------

namespace {

int64_t second_level = 1 << 20;  // bytes of a core's cache; a common size, for systems that don't report it

void read_caches() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
    long size = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (size > 0) second_level = size;
#endif
}

// Returns true if the processor converts float16 (F16C), as all with AVX2 do. Older compilers can't test for it by name.
[[maybe_unused]] bool converts_float16() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
#else
    return false;
#endif
}

// Returns true if the processor multiplies bfloat16 in tiles (AMX) and the system saves them.
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

// Returns true if the processor multiplies pairs of bfloat16 (vdpbf16ps) at half the rate of float32, so that converting
// them to float32 is faster. Intel's do since Golden Cove (measured on Emerald Rapids: 86 and 174 GFLOP/s a core). Cooper
// Lake, the first with the instruction, and AMD's multiply pairs at twice the rate.
bool has_slow_pairs() {
#if defined(__x86_64__)
    constexpr unsigned COOPER_LAKE = 0x55;  // a model of family 6
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_INTEL_ebx || !__get_cpuid(1, &a, &b, &c, &d)) return false;
    unsigned family = a >> 8 & 15, model = (a >> 4 & 15) | (a >> 12 & 0xf0);
    return !(family == 6 && model == COOPER_LAKE);
#else
    return false;
#endif
}

// Returns true if this process may use tiles. On Linux a process must request the permission, once.
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

int64_t second_level_cache() { return second_level; }

// -- threads ---------------------------------------------------------------------------------------

namespace {

typedef void (*Fork)(void (*)(void *), void *, unsigned, unsigned);  // libgomp's GOMP_parallel

Fork pool = nullptr;
bool forked = false;

#if defined(__linux__)
int find_pool(dl_phdr_info *info, size_t, void *found) {
    const char *name = info->dlpi_name;
    if (!strstr(name, "libgomp")) return 0;
    void *library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return 0;
    *(Fork *)found = (Fork)dlsym(library, "GOMP_parallel");
    return strstr(name, "torch") != nullptr;  // PyTorch's own, if there are several
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
        // The system can't start more threads, so those that are running share the work.
    }
    work(data);
    for (std::thread &other : others) other.join();
}

#if defined(TIMED)
double part_seconds[PARTS];
#endif

// -- functions that Python calls -------------------------------------------------------------------

extern "C" {

// Finds PyTorch's pool, unless this process mustn't use it. Returns true on success.
__attribute__((visibility("default"))) int manyheads_begin(int own_threads) {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    read_caches();
#if defined(__linux__)
    if (!own_threads) dl_iterate_phdr(find_pool, &pool);
#endif
    (void)own_threads;
    return pool != nullptr;
}

__attribute__((visibility("default"))) int64_t manyheads_interface() {
    return ((INTERFACE * 1000 + sizeof(Statistics)) * 1000 + sizeof(Gradient)) * 1000 + sizeof(Problem);
}

// Returns true if a build exists and this processor runs it: 0 portable, 1 avx2, 2 avx512, 3 avx512bf16, 4 amx.
__attribute__((visibility("default"))) int manyheads_runs(int level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && converts_float16();
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

// Returns 0 if this processor has no tiles for bfloat16 (AMX), 1 if this process may not use them, 2 if it may.
__attribute__((visibility("default"))) int manyheads_tiles() { return has_tiles() ? 1 + may_use_tiles() : 0; }

// Returns true if the build avx512 is faster on this processor than avx512bf16.
__attribute__((visibility("default"))) int manyheads_slow_pairs() { return has_slow_pairs(); }

// Computes a problem, with statistics unless they are null. Returns 0, or 1 if there is no memory for packing.
__attribute__((visibility("default"))) int manyheads_attend(const Problem *problem, const Statistics *statistics,
                                                            int level) {
    void (*builds[])(const Problem *, const Statistics *) = EACH(attend);
    try {
        problem->dtype == FLOAT64 ? attend_float64(problem, statistics) : builds[level](problem, statistics);
    } catch (const std::bad_alloc &) { return 1; }
    return 0;
}

// Computes scale · q·k with softcap of all queries and keys, [b, h, t, s], contiguous; mask, bias and values aren't read.
// Returns 0, or 1 if there is no memory for a panel of keys.
__attribute__((visibility("default"))) int manyheads_scores(const Problem *problem, void *to, int level) {
    void (*builds[])(const Problem *, void *) = EACH(scores);
    try {
        problem->dtype == FLOAT64 ? scores_float64(problem, to) : builds[level](problem, to);
    } catch (const std::bad_alloc &) { return 1; }
    return 0;
}

// Computes the gradient. Returns 0, 1 if there is no memory for packing and sums, or 2 if some number isn't finite.
__attribute__((visibility("default"))) int manyheads_differentiate(const Problem *problem, const Gradient *gradient,
                                                                   int level) {
    int (*builds[])(const Problem *, const Gradient *) = EACH(differentiate);
    try {
        return problem->dtype == FLOAT64 ? differentiate_float64(problem, gradient) : builds[level](problem, gradient);
    } catch (const std::bad_alloc &) { return 1; }
}

#if defined(TIMED)
// Writes the seconds of each `Part` since the last call.
__attribute__((visibility("default"))) void manyheads_parts(double *seconds) {
    for (int part = 0; part < PARTS; part++) seconds[part] = part_seconds[part], part_seconds[part] = 0;
}
#endif

}  // extern "C"
