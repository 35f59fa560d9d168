// Which build this processor runs, and the threads that run it.
//
// The threads are those of PyTorch's own OpenMP, found in the process rather than linked, so that there is one
// pool and nobody waits beside it. That pool doesn't live on in a forked child: there, and where PyTorch has
// another one, a call starts threads of its own.
#include "problem.h"

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <thread>
#include <vector>

void attend_float64(const Problem *p);
void attend_portable(const Problem *p);
#if defined(__x86_64__)
void attend_avx2(const Problem *p);
void attend_avx512(const Problem *p);
void attend_avx512bf16(const Problem *p);
#endif

// -- memory ----------------------------------------------------------------------------------------

namespace {

constexpr int64_t HUGE_PAGE = 1 << 21, KEPT = 64 << 20;  // bytes: what is larger isn't kept between calls

struct Memory {
    void *at = nullptr;
    int64_t size = 0;
    void *get(int64_t bytes) {
        if (bytes <= size && size <= KEPT) return at;
        free(at);
        size = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
        at = aligned_alloc(HUGE_PAGE, size);
        if (!at) abort();
        madvise(at, size, MADV_HUGEPAGE);
        return at;
    }
    ~Memory() { free(at); }
};

thread_local Memory first, second;

}  // namespace

void *scratch(int64_t bytes) { return first.get(bytes); }
void *store_of(int64_t bytes) { return second.get(bytes); }

// -- threads ---------------------------------------------------------------------------------------

namespace {

typedef void (*Fork)(void (*)(void *), void *, unsigned, unsigned);  // libgomp's GOMP_parallel

Fork pool = nullptr;
bool forked = false;

int look(dl_phdr_info *info, size_t, void *found) {
    const char *name = info->dlpi_name;
    if (!strstr(name, "libgomp")) return 0;
    void *library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) return 0;
    *(Fork *)found = (Fork)dlsym(library, "GOMP_parallel");
    return strstr(name, "torch") != nullptr;  // PyTorch's own, where there are several
}

struct Job {
    void (*work)(void *, int64_t);
    void *data;
};

void start(void *job) { ((Job *)job)->work(((Job *)job)->data, 0); }

}  // namespace

void parallel(int64_t threads, void (*work)(void *, int64_t), void *data) {
    if (threads <= 1) return work(data, 0);
    if (pool && !forked) {
        Job job = {work, data};
        return pool(start, &job, (unsigned)threads, 0);
    }
    std::vector<std::thread> others;
    for (int64_t n = 1; n < threads; n++) others.emplace_back(work, data, n);
    work(data, 0);
    for (std::thread &one : others) one.join();
}

// -- what Python calls -----------------------------------------------------------------------------

extern "C" {

// Looks for PyTorch's pool, unless this process shouldn't use it. True if it is found.
__attribute__((visibility("default"))) int manyheads_begin(int own_threads) {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    if (!own_threads) dl_iterate_phdr(look, &pool);
    return pool != nullptr;
}

__attribute__((visibility("default"))) int64_t manyheads_interface() { return INTERFACE * 10000 + sizeof(Problem); }

// Can this processor run a build, by its number? 0 portable, 1 avx2, 2 avx512, 3 avx512bf16.
__attribute__((visibility("default"))) int manyheads_runs(int level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    bool levels[] = {true, avx2, avx512, avx512 && __builtin_cpu_supports("avx512bf16")};
    return levels[level];
#else
    return level == 0;
#endif
}

__attribute__((visibility("default"))) void manyheads_attend(const Problem *p, int level) {
    if (p->dtype == FLOAT64) return attend_float64(p);
#if defined(__x86_64__)
    void (*builds[])(const Problem *) = {attend_portable, attend_avx2, attend_avx512, attend_avx512bf16};
    builds[level](p);
#else
    attend_portable(p);
#endif
}

}  // extern "C"
