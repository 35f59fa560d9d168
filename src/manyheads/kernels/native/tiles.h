// The tile registers of AMX, eight of 16 rows of 64 bytes, and the five instructions that the kernel needs: Intel 64 and
// IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS. They are written as assembler, because a template
// can't hand a register's number to the compilers' own functions.
//
// With EMULATE_TILES they are plain loops, for tests on processors without tiles.
#pragma once
#include "vectors.h"

#include <cstdlib>

#if defined(EMULATE_TILES) || defined(__AMX_BF16__)
#define TILES

namespace {

// Eight whole tiles, as LDTILECFG reads it; the places of further ones must be 0.
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

// Holds tiles as long as it lives; a thread has one at a time.
struct TilesReady {
    TilesReady() {
        Configuration all;
        for (int n = 0; n < 16; n++)
            if (all.rows[n] != (n < 8 ? 16 : 0) || all.row_bytes[n] != 4 * all.rows[n]) abort();
        registers.ready = true;
    }
    ~TilesReady() { registers.ready = false; }
};

INLINE void tile_check() {
    if (!registers.ready) abort();  // on a processor it would be an illegal instruction
}
template <int N> INLINE void tile_zero() { tile_check(), memset(registers.bytes[N], 0, 1024); }
template <int N> INLINE void tile_load(const void *from, int64_t step) {
    tile_check();
    for (int row = 0; row < 16; row++) memcpy(registers.bytes[N][row], (const char *)from + row * step, 64);
}
template <int N> INLINE void tile_store(void *to, int64_t step) {
    tile_check();
    for (int row = 0; row < 16; row++) memcpy((char *)to + row * step, registers.bytes[N][row], 64);
}
template <int TO, int A, int B> INLINE void tile_multiply() {
    tile_check();
    for (int row = 0; row < 16; row++) {
        V first = {}, second = {};  // of each pair
        for (int k = 0; k < 16; k++) {
            int32_t a;
            memcpy(&a, registers.bytes[A][row] + 4 * k, 4);
            I b;
            memcpy(&b, registers.bytes[B][k], 64);
            first += (V)(I{} + (a << 16)) * (V)(b << 16);
            second += (V)(I{} + (a & -65536)) * (V)(b & -65536);
        }
        R *to = (R *)registers.bytes[TO][row];
        store(to, load(to) + (first + second));
    }
}

#else

struct TilesReady {
    TilesReady() {
        Configuration all;
        __asm__ volatile("ldtilecfg %0" ::"m"(all));
    }
    ~TilesReady() { __asm__ volatile("tilerelease"); }
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
