// Measures the processor's peak throughput of multiply-adds on registers: in float32, and in bfloat16 by dot products
// of pairs (AVX-512) or by AMX tiles.
//
// `manyheads bench` compiles this file for the current processor, and calls it from as many threads as PyTorch uses.
#include <cstdint>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, COLUMNS = 4;
#elif defined(__AVX2__)
constexpr int BYTES = 32, COLUMNS = 2;
#else
constexpr int BYTES = 16, COLUMNS = 2;
#endif
constexpr int ROWS = 6;  // ROWS × COLUMNS independent sums hide the latency of a multiply-add
typedef float Vector __attribute__((vector_size(BYTES)));

// Hides a value from the compiler, which could otherwise compute with it at compile time.
#if defined(__aarch64__)
#define OPAQUE(v) __asm__ volatile("" : "+w"(v))
#elif defined(__x86_64__)
#define OPAQUE(v) __asm__ volatile("" : "+v"(v))
#else
#define OPAQUE(v) __asm__ volatile("" : "+m"(v))
#endif

// Runs rounds of multiply-adds, with `pairs` products per float32 lane, and returns the number of operations.
template <class Add> double multiply_add(int64_t rounds, int pairs, Add add) {
    // Every loop over these arrays is unrolled: compilers hold an array in registers only if all its indices are constants.
    Vector sum[ROWS][COLUMNS] = {}, a = Vector{} + 1e-3f, b[COLUMNS];
#pragma GCC unroll 4
    for (Vector &column : b) column = a;
#pragma GCC unroll 6
    for (auto &row : sum)
#pragma GCC unroll 4
        for (Vector &accumulator : row) OPAQUE(accumulator);  // otherwise equal sums would be computed once
    for (int64_t round = 0; round < rounds; round++) {
        OPAQUE(a);
#pragma GCC unroll 4
        for (Vector &column : b) OPAQUE(column);
#pragma GCC unroll 6
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
            for (int n = 0; n < COLUMNS; n++) sum[i][n] = add(sum[i][n], a, b[n]);
    }
#pragma GCC unroll 6
    for (auto &row : sum)
#pragma GCC unroll 4
        for (Vector &accumulator : row) OPAQUE(accumulator);
    return 2. * pairs * ROWS * COLUMNS * (BYTES / 4) * rounds;
}

bool has_tiles() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16, AMX-TILE
#else
    return false;
#endif
}

// Asks Linux for permission to use AMX tiles. Returns false if it is denied, or if this build has no AMX instructions.
bool request_tiles() {
#if defined(__AMX_BF16__) && defined(__linux__)
    return has_tiles() && syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
#else
    return false;
#endif
}

}  // namespace

extern "C" {

// Runs rounds of multiply-adds in float32, and returns the number of operations.
double float32(int64_t rounds) {
    return multiply_add(rounds, 1, [](Vector sum, Vector a, Vector b) { return sum + a * b; });
}

// Does the same in bfloat16. Returns 0 if the processor has no instruction for it, and -1 if it has AMX tiles that this
// build can't use or Linux doesn't permit.
double bfloat16(int64_t rounds) {
    if (has_tiles() && !request_tiles()) return -1;
#if defined(__AMX_BF16__)
    if (has_tiles()) {
        struct alignas(64) {
            uint8_t palette = 1, reserved[15] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } configuration;
        _tile_loadconfig(&configuration);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        _tile_zero(4);
        _tile_zero(5);
        _tile_zero(6);
        _tile_zero(7);
        for (int64_t round = 0; round < rounds; round++) {  // four accumulator tiles, as in the kernel's matrix product
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_release();
        return 2. * 4 * 16 * 16 * 32 * rounds;
    }
#endif
#if defined(__AVX512BF16__)
    return multiply_add(rounds, 2, [](Vector sum, Vector a, Vector b) {
        return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    });
#else
    (void)rounds;
    return 0;
#endif
}
}
