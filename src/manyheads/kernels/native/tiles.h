// The AMX instructions that the kernel needs (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2,
// TDPBF16PS). AMX has eight tile registers, each of 16 rows of 64 bytes. The instructions are in inline assembly,
// because compilers' intrinsics don't accept a template parameter as the number of a register.
//
// With EMULATE_TILES the instructions are plain loops, for tests on processors without AMX.
#pragma once
#include "vectors.h"

#include <cstdlib>

#if defined(EMULATE_TILES) || defined(__AMX_BF16__)
#define TILES

namespace {

// The operand of LDTILECFG: eight full tiles. The format has 16 entries, and the unused ones must be 0.
struct alignas(64) Configuration {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Configuration) == 64);

#if defined(EMULATE_TILES)

thread_local struct {
    bool ready;
    alignas(64) uint8_t bytes[8][16][64];
} registers;

// Configures the tiles of this thread until it is destroyed. A thread can have only one session at a time.
struct TileSession {
    TileSession() {
        Configuration configuration;
        for (int n = 0; n < 16; n++)
            if (configuration.rows[n] != (n < 8 ? 16 : 0) || configuration.row_bytes[n] != 4 * configuration.rows[n])
                abort();
        registers.ready = true;
    }
    ~TileSession() { registers.ready = false; }
};

INLINE void check_session() {
    if (!registers.ready) abort();  // as on a processor, which would raise an illegal-instruction fault
}
template <int N> INLINE void tile_zero() { check_session(), memset(registers.bytes[N], 0, 1024); }
template <int N> INLINE void tile_load(const void *from, int64_t step) {
    check_session();
    for (int row = 0; row < 16; row++) memcpy(registers.bytes[N][row], (const char *)from + row * step, 64);
}
template <int N> INLINE void tile_store(void *to, int64_t step) {
    check_session();
    for (int row = 0; row < 16; row++) memcpy((char *)to + row * step, registers.bytes[N][row], 64);
}
template <int TO, int A, int B> INLINE void tile_multiply() {
    check_session();
    for (int row = 0; row < 16; row++) {
        Vector first = {}, second = {};  // sums over the first and the second number of each bfloat16 pair
        for (int k = 0; k < 16; k++) {
            int32_t a = read<int32_t>(registers.bytes[A][row] + 4 * k);
            Integers b = read<Integers>(registers.bytes[B][k]);
            first += (Vector)(Integers{} + (a << 16)) * (Vector)(b << 16);
            second += (Vector)(Integers{} + (a & -65536)) * (Vector)(b & -65536);
        }
        Real *to = (Real *)registers.bytes[TO][row];
        store(to, load(to) + (first + second));
    }
}

#else

struct TileSession {
    TileSession() {
        Configuration configuration;
        __asm__ volatile("ldtilecfg %0" ::"m"(configuration));
    }
    ~TileSession() { __asm__ volatile("tilerelease"); }
};

template <int N> INLINE void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(N)); }
template <int N> INLINE void tile_load(const void *from, int64_t step) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(step), "i"(N) : "memory");
}
template <int N> INLINE void tile_store(void *to, int64_t step) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(step), "i"(N) : "memory");
}
template <int TO, int A, int B> INLINE void tile_multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(A), "i"(B));
}

#endif

}  // namespace

#endif
