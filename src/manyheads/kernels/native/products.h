// Number formats, packing into panels, and products of a few rows by a panel, whose sums stay in registers. The forward
// pass and the gradient consist of these.
#pragma once
#include "problem.h"
#include "tiles.h"
#include "vectors.h"

#include <cmath>

void *scratch(int64_t bytes);       // aligned memory of this thread, valid until its next call
void *call_storage(int64_t bytes);  // a second piece of memory of this thread
void release_storage();             // frees the second piece if it is large
int64_t second_level_cache();       // bytes of the second-level cache of a core

namespace {

constexpr int ROW_GROUP = 6;  // rows that a product computes at once
constexpr int VECTORS = BYTES == 64 ? 4 : 2;
constexpr int PANEL = VECTORS * LANES;  // columns of a panel: keys, or numbers of a value
#if defined(REAL)
typedef long double Wide;
#else
typedef double Wide;
#endif
constexpr Wide LOG2E = 1.44269504088896340736L;
constexpr Real INF = __builtin_inf();

template <class T> INLINE T smaller(T a, T b) { return a < b ? a : b; }
template <class T> INLINE T larger(T a, T b) { return a > b ? a : b; }
// Calls f(j, j * step) for j < count. For a step of 1 there is a separate loop, which compilers vectorise.
template <class F> INLINE void each(int64_t count, int64_t step, F f) {
    if (step == 1)
        for (int64_t j = 0; j < count; j++) f(j, j);
    else
        for (int64_t j = 0; j < count; j++) f(j, j * step);
}
INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Calls f(row, count) for groups of four rows and the rest. count is a constant while compiling: a template's argument.
template <int N> struct Constant {
    constexpr operator int() const { return N; }
};
template <class F> INLINE void each_four(int64_t rows, F f) {
    for (int64_t row = 0; row < rows; row += 4) switch (rows - row) {
            case 1: f(row, Constant<1>()); break;
            case 2: f(row, Constant<2>()); break;
            case 3: f(row, Constant<3>()); break;
            default: f(row, Constant<4>());
        }
}

// -- numbers ---------------------------------------------------------------------------------------

INLINE uint32_t bits(float x) { return read<uint32_t>(&x); }
INLINE float from_bits(uint32_t u) { return read<float>(&u); }
INLINE bool is_finite(Real x) { return x - x == 0; }

enum class Float16 : uint16_t {};  // their bits
enum class BFloat16 : uint16_t {};

INLINE Real widen(Real x) { return x; }
INLINE float widen(BFloat16 x) { return from_bits((uint32_t)x << 16); }
INLINE float widen(Float16 x) {
    uint32_t sign = ((uint32_t)x & 0x8000) << 16, rest = (uint32_t)x & 0x7fff;
    float small = (float)rest * 5.9604644775390625e-08f;  // below 2^-14: rest * 2^-24
    float usual = from_bits((rest << 13) + 0x38000000);
    float large = from_bits((rest << 13) | 0x7f800000);  // infinity, NaN
    float y = rest < 0x0400 ? small : rest < 0x7c00 ? usual : large;
    return from_bits(bits(y) | sign);
}

// LANES adjacent numbers.
INLINE Vector widen(const Real *x) { return load(x); }
#if !defined(REAL)
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
#if defined(VECTORS_512)  // one instruction; GCC 12 converts such a vector by halves
INLINE Integers widen_integers(const void *x) { return (Integers)_mm512_cvtepu16_epi32(read<__m256i>(x)); }
INLINE Vector widen(const Float16 *x) { return (Vector)_mm512_cvtph_ps(read<__m256i>(x)); }
#elif defined(VECTORS_256)
INLINE Integers widen_integers(const void *x) { return (Integers)_mm256_cvtepu16_epi32(read<__m128i>(x)); }
INLINE Vector widen(const Float16 *x) { return (Vector)_mm256_cvtph_ps(read<__m128i>(x)); }
#else
INLINE Integers widen_integers(const void *x) { return __builtin_convertvector(read<Shorts>(x), Integers); }
INLINE Vector widen(const Float16 *x) {
    Integers u = widen_integers(x), sign = (u & 0x8000) << 16, rest = u & 0x7fff;
    Vector small = __builtin_convertvector(rest, Vector) * 5.9604644775390625e-08f;
    Integers y = rest < 0x0400   ? (Integers)small
                 : rest < 0x7c00 ? (rest << 13) + 0x38000000
                                 : (rest << 13) | 0x7f800000;
    return (Vector)(y | sign);
}
#endif
INLINE Vector widen(const BFloat16 *x) { return (Vector)(widen_integers(x) << 16); }
#endif

// The first `count` of LANES numbers, and zeros; memory beyond them isn't read.
template <class T> INLINE Vector widen_first(const T *x, int64_t count) {
    T first[LANES] = {};
    for (int n = 0; n < LANES - 1 && n < count; n++) first[n] = x[n];
    return widen(first);
}
#if defined(VECTORS_512)
INLINE Vector widen_first(const Real *x, int64_t count) {
    return (Vector)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), x);
}
#elif defined(VECTORS_256)
INLINE Vector widen_first(const Real *x, int64_t count) {
    const Integers place = {0, 1, 2, 3, 4, 5, 6, 7};
    return (Vector)_mm256_maskload_ps(x, (__m256i)(place < (Integer)count));
}
#endif

INLINE void narrow(Real x, Real &y) { y = x; }
INLINE void narrow(float x, BFloat16 &y) {  // to the nearest, ties to even
    uint32_t u = bits(x);
    y = (BFloat16)(x != x ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
INLINE void narrow(float x, Float16 &y) {
    uint32_t u = bits(x), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
    if (rest >= 0x47800000) {  // 2^16 and more: infinity or NaN
        y = (Float16)(sign | (rest > 0x7f800000 ? 0x7e00 : 0x7c00));
    } else if (rest < 0x38800000) {             // below 2^-14: a whole number of 2^-24
        float lifted = from_bits(rest) + 0.5f;  // 2^-1, whose last bit is 2^-24: rounds to even
        y = (Float16)(sign | (bits(lifted) - 0x3f000000));
    } else {
        y = (Float16)(sign | ((rest + 0xfff + ((rest >> 13) & 1) - 0x38000000) >> 13));
    }
}

// Rounds a vector, or its first `count` numbers.
template <class T> INLINE void narrow(Vector v, T *to) {
    for (int n = 0; n < LANES; n++) narrow(v[n], to[n]);
}
INLINE void narrow(Vector v, Real *to) { store(to, v); }
#if defined(VECTORS_512)
INLINE void narrow(Vector v, Float16 *to) {
    __m256i rounded = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
    memcpy(to, &rounded, sizeof rounded);
}
#elif defined(VECTORS_256)
INLINE void narrow(Vector v, Float16 *to) {
    __m128i rounded = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
    memcpy(to, &rounded, sizeof rounded);
}
#endif
#if !defined(REAL)
INLINE Integers to_bfloat16(Vector v) {  // to the nearest bfloat16, ties to even
    Unsigneds u = (Unsigneds)v, even = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return v != v ? Integers{} + 0x7fc0 : (Integers)even;
}
INLINE void narrow(Vector v, BFloat16 *to) {
    Shorts u = __builtin_convertvector((Unsigneds)to_bfloat16(v), Shorts);
    memcpy(to, &u, sizeof u);
}
#endif
template <class T> INLINE void narrow(Vector v, T *to, int64_t count) {
    if (count == LANES) return narrow(v, to);
    for (int64_t n = 0; n < count; n++) narrow(v[n], to[n]);
}

// -- products --------------------------------------------------------------------------------------

// Flags of a key's value.
constexpr uint8_t INFINITE = 1;  // some number is infinite or NaN, and 0 in the panel
constexpr uint8_t EXTREME = 2;   // the product of some number with a large weight may overflow or lose digits
#if !defined(REAL)
constexpr Real EXTREME_FROM = 0x1p32f;  // or below its inverse, except for 0
#endif

// How numbers are multiplied and laid out in panels: one by one in float32 (Single), in bfloat16 by pairs (Pairs) or in
// tiles (Tiles). A unit is a number, or a pair of numbers. A panel is [k / PAIR][PANEL] units, or in tiles
// [k / 32][PANEL / 16][16][16]; `place` returns where a unit is. A row on the left side is [k]. A product reads k rounded up
// to DEPTH_MULTIPLE, where the numbers must be 0, and rows on the left rounded up to ROWS_MULTIPLE, which may be anything;
// it writes as many rows.
struct Single {
    typedef Real Element;
    struct Session {};  // a thread has one while it multiplies
    // Returns LANES units of a row of n numbers, from unit x on; zeros beyond its end.
    template <class T> INLINE Vector units(const T *row, int64_t step, int64_t x, int64_t n) {
        if (step == 1) return x + LANES <= n ? widen(row + x) : widen_first(row + x, n - x);
        Real at[LANES];
        for (int j = 0; j < LANES; j++) at[j] = x + j < n ? widen(row[(x + j) * step]) : (Real)0;
        return load(at);
    }
    // Writes a row of values to a panel, 0 for non-finite numbers, and adds its flags to `kind`.
    template <class T>
    INLINE void values(Real *to, const T *row, const T *, int64_t step, int64_t width, uint8_t *kind) {
        Integers infinite = {}, extreme = {};
        for (int64_t x = 0; x < PANEL; x += LANES) {
            Vector v = x < width ? units(row, step, x, width) : Vector{};
            Integers fine = v - v == (Real)0;
            infinite |= ~fine;
#if defined(HAS_EXP)
            Vector size = v < 0 ? -v : v;
            extreme |= (size > EXTREME_FROM) | ((size < 1 / EXTREME_FROM) & (v != 0));
#endif
            store(to + x, (Vector)((Integers)v & fine));
        }
        *kind |= (bit_mask(infinite) ? INFINITE : 0) | (bit_mask(extreme) ? EXTREME : 0);
    }
    static constexpr int PAIR = 1, DEPTH_MULTIPLE = 1, ROWS_MULTIPLE = 1, KEYS = 256;  // KEYS: keys in a step
    template <int STEP = PANEL> INLINE int64_t place(int64_t unit, int64_t column) { return unit * STEP + column; }
    INLINE Real pack(Real x) { return x; }
    INLINE Real unpack(Real x) { return x; }
    INLINE Vector left(const Real *a) { return broadcast(*a); }
    INLINE Vector right(const Real *b) { return load(b); }
    INLINE Vector add(Vector sum, Vector a, Vector b) { return sum + a * b; }
    INLINE void weights(Real *to, Vector low, Vector high) { store(to, low), store(to + LANES, high); }
    INLINE void round(Real *to, Vector v) { store(to, v); }
};

#if defined(__AVX512BF16__) || defined(EMULATE_TILES)
struct Pairs {
    typedef BFloat16 Element;
    struct Session {};
    INLINE Vector units(const BFloat16 *row, int64_t step, int64_t x, int64_t n) {
        BFloat16 at[2 * LANES] = {};
        if (step == 1 && 2 * (x + LANES) <= n) memcpy(at, row + 2 * x, BYTES);
        else
            for (int64_t j = 0; j < 2 * LANES && 2 * x + j < n; j++) at[j] = row[(2 * x + j) * step];
        return read<Vector>(at);
    }
    // The same for two rows, pair by pair; the second may be null.
    INLINE void values(BFloat16 *to, const BFloat16 *row, const BFloat16 *second, int64_t step, int64_t width,
                       uint8_t *kind) {
        uint32_t pairs[PANEL] = {}, least[2] = {~0u, ~0u}, most[2] = {};
        for (int64_t x = 0; x < width; x++) {
            uint32_t a = (uint32_t)row[x * step], b = second ? (uint32_t)second[x * step] : 0;
            uint32_t size_a = a & 0x7fff, size_b = b & 0x7fff;
            pairs[x] = (size_a < 0x7f80 ? a : 0) | (size_b < 0x7f80 ? b : 0) << 16;
            least[0] = smaller(least[0], size_a - 1),
            least[1] = smaller(least[1], size_b - 1);  // 0 - 1 is the largest number: zeros don't count
            most[0] = larger(most[0], size_a), most[1] = larger(most[1], size_b);
        }
        memcpy(to, pairs, sizeof pairs);
        const uint32_t low = bits(1 / EXTREME_FROM) >> 16, high = bits(EXTREME_FROM) >> 16;
        for (int n = 0; n < (second ? 2 : 1); n++)
            kind[n] |= (most[n] >= 0x7f80 ? INFINITE : 0) | (most[n] > high || least[n] < low - 1 ? EXTREME : 0);
    }
    static constexpr int PAIR = 2, DEPTH_MULTIPLE = 2, ROWS_MULTIPLE = 1, KEYS = 512;
    template <int STEP = PANEL> INLINE int64_t place(int64_t unit, int64_t column) {
        return (unit * STEP + column) * PAIR;
    }
    INLINE BFloat16 pack(Real x) {
        BFloat16 y;
        narrow(x, y);
        return y;
    }
    INLINE Real unpack(BFloat16 x) { return widen(x); }
    INLINE Vector left(const BFloat16 *a) { return (Vector)(Integers{} + read<int32_t>(a)); }
    INLINE Vector right(const BFloat16 *b) { return load((const Real *)b); }
#if defined(__AVX512BF16__)
    INLINE Vector add(Vector sum, Vector a, Vector b) {
        return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
    INLINE Integers narrowed(Vector v) {
        return (Integers)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v));
    }
    INLINE void weights(BFloat16 *to, Vector low, Vector high) {
        __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        memcpy(to, &both, 64);
    }
    INLINE void round(BFloat16 *to, Vector v) {
        __m256bh half = _mm512_cvtneps_pbh((__m512)v);
        memcpy(to, &half, 32);
    }
#else
    INLINE Vector add(Vector sum, Vector a, Vector b) {
        sum += (Vector)((Integers)a << 16) * (Vector)((Integers)b << 16);
        return sum + (Vector)((Integers)a & -65536) * (Vector)((Integers)b & -65536);
    }
    INLINE Integers narrowed(Vector v) { return to_bfloat16(v); }
    INLINE void weights(BFloat16 *to, Vector low, Vector high) { round(to, low), round(to + LANES, high); }
    INLINE void round(BFloat16 *to, Vector v) { narrow(v, to); }
#endif
    INLINE void pair(BFloat16 *to, Vector a, Vector b) {  // of two rows, number by number
        Integers both = narrowed(a) | narrowed(b) << 16;
        memcpy(to, &both, BYTES);
    }
};
#endif

#if defined(TILES)
// Products in AMX tiles of 16 rows of 64 bytes: four tiles hold the sums of 32 rows and 32 columns. The rows of a panel's
// tile are adjacent, so that a processor prefetches them: loading a tile reads 1 KB.
struct Tiles : Pairs {
    static constexpr int DEPTH_MULTIPLE = 32, ROWS_MULTIPLE = 16, KEYS = 128;
    static constexpr int TILE = 512;  // numbers in a tile
    typedef TileSession Session;

    template <int STEP = PANEL> INLINE int64_t place(int64_t unit, int64_t column) {
        return (unit / 16 * (STEP / 16) + column / 16) * TILE + (unit % 16 * 16 + column % 16) * PAIR;
    }
    INLINE void values(BFloat16 *to, const BFloat16 *row, const BFloat16 *second, int64_t step, int64_t width,
                       uint8_t *kind) {
        BFloat16 units[PANEL * PAIR];
        Pairs::values(units, row, second, step, width, kind);
        for (int64_t column = 0; column < PANEL; column += 16)
            memcpy(to + place(0, column), units + column * PAIR, 16 * PAIR * sizeof(BFloat16));
    }

    // to [32 or 16 rows, 16 or 32 columns] (+)= a · panel
    template <int ROWS, int COLUMNS, bool ADD, int STEP>
    INLINE void block(const BFloat16 *a, int64_t a_row, const BFloat16 *panel, Real *to, int64_t to_row, int64_t k) {
        int64_t a_step = a_row * sizeof(BFloat16), to_step = to_row * sizeof(Real);
        const BFloat16 *b = a + 16 * a_row;
        Real *low = to + 16 * to_row;
        if (ADD) {
            tile_load<0>(to, to_step);
            if (COLUMNS == 2) tile_load<1>(to + 16, to_step);
            if (ROWS == 2) tile_load<2>(low, to_step);
            if (ROWS == 2 && COLUMNS == 2) tile_load<3>(low + 16, to_step);
        } else {
            tile_zero<0>();
            if (COLUMNS == 2) tile_zero<1>();
            if (ROWS == 2) tile_zero<2>();
            if (ROWS == 2 && COLUMNS == 2) tile_zero<3>();
        }
        for (int64_t x = 0; x < k; x += DEPTH_MULTIPLE) {
            tile_load<4>(a + x, a_step), tile_load<6>(panel + x * STEP, 64);
            tile_multiply<0, 4, 6>();
            if (COLUMNS == 2) tile_load<7>(panel + x * STEP + TILE, 64), tile_multiply<1, 4, 7>();
            if (ROWS == 2) tile_load<5>(b + x, a_step), tile_multiply<2, 5, 6>();
            if (ROWS == 2 && COLUMNS == 2) tile_multiply<3, 5, 7>();
        }
        tile_store<0>(to, to_step);
        if (COLUMNS == 2) tile_store<1>(to + 16, to_step);
        if (ROWS == 2) tile_store<2>(low, to_step);
        if (ROWS == 2 && COLUMNS == 2) tile_store<3>(low + 16, to_step);
    }

    template <bool ADD, int STEP>
    static void multiply_block(int rows, int64_t columns, const BFloat16 *a, int64_t a_row, const BFloat16 *panel,
                               Real *to, int64_t to_row, int64_t k) {
        for (int i = 0; i < rows; i += 32, a += 32 * a_row, to += 32 * to_row) {
            bool two = rows - i > 16;
            for (int64_t c = 0; c < columns; c += 32) {
                const BFloat16 *b = panel + place(0, c);
                if (two && columns - c > 16) block<2, 2, ADD, STEP>(a, a_row, b, to + c, to_row, k);
                else if (two) block<2, 1, ADD, STEP>(a, a_row, b, to + c, to_row, k);
                else if (columns - c > 16) block<1, 2, ADD, STEP>(a, a_row, b, to + c, to_row, k);
                else block<1, 1, ADD, STEP>(a, a_row, b, to + c, to_row, k);
            }
        }
    }
};
#endif

// The type of products of bfloat16 numbers, the fastest that this build has.
#if defined(TILES)
typedef Tiles BFloat16Products;
#elif defined(__AVX512BF16__)
typedef Pairs BFloat16Products;
#else
typedef Single BFloat16Products;
#endif

// to [H, N vectors] (+)= a [H, k] · panel [k, N vectors]; WITH_MAXIMA updates the maxima of the rows. STEP is the distance
// between numbers of a panel along k.
template <class Op, int H, int N, bool ADD, bool WITH_MAXIMA, int STEP>
INLINE void multiply_block(const typename Op::Element *a, int64_t a_row, const typename Op::Element *panel, Real *to,
                           int64_t to_row, int64_t k, Vector *maxima) {
    Vector sum[H][N];
    for (int i = 0; i < H; i++)
        for (int n = 0; n < N; n++) sum[i][n] = ADD ? load(to + i * to_row + n * LANES) : Vector{};
    for (int64_t x = 0; x < k; x += Op::PAIR) {
        Vector b[N];
        for (int n = 0; n < N; n++) b[n] = Op::right(panel + x * STEP + n * LANES * Op::PAIR);
#pragma GCC unroll 6
        for (int i = 0; i < H; i++) {
            Vector one = Op::left(a + i * a_row + x);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sum[i][n] = Op::add(sum[i][n], one, b[n]);
        }
    }
    for (int i = 0; i < H; i++) {
        for (int n = 0; n < N; n++) store(to + i * to_row + n * LANES, sum[i][n]);
        if (WITH_MAXIMA)
            for (int n = 0; n < N; n++) maxima[i] = max(sum[i][n], maxima[i]);
    }
}

template <class Op, int N, bool ADD, bool WITH_MAXIMA, int STEP>
static void multiply_rows(int rows, const typename Op::Element *a, int64_t a_row, const typename Op::Element *panel,
                          Real *to, int64_t to_row, int64_t k, Vector *maxima) {
    int i = 0;
    for (; i + ROW_GROUP <= rows; i += ROW_GROUP)
        multiply_block<Op, ROW_GROUP, N, ADD, WITH_MAXIMA, STEP>(a + i * a_row, a_row, panel, to + i * to_row, to_row,
                                                                 k, maxima + i);
    a += i * a_row, to += i * to_row, maxima += i;
    switch (rows - i) {
        case 5: return multiply_block<Op, 5, N, ADD, WITH_MAXIMA, STEP>(a, a_row, panel, to, to_row, k, maxima);
        case 4: return multiply_block<Op, 4, N, ADD, WITH_MAXIMA, STEP>(a, a_row, panel, to, to_row, k, maxima);
        case 3: return multiply_block<Op, 3, N, ADD, WITH_MAXIMA, STEP>(a, a_row, panel, to, to_row, k, maxima);
        case 2: return multiply_block<Op, 2, N, ADD, WITH_MAXIMA, STEP>(a, a_row, panel, to, to_row, k, maxima);
        case 1: return multiply_block<Op, 1, N, ADD, WITH_MAXIMA, STEP>(a, a_row, panel, to, to_row, k, maxima);
    }
}

// Multiplies rows by the first `columns` columns of a panel.
template <class Op, bool ADD, bool WITH_MAXIMA, int STEP = PANEL>
static void multiply(int rows, int64_t columns, const typename Op::Element *a, int64_t a_row,
                     const typename Op::Element *panel, Real *to, int64_t to_row, int64_t k, Vector *maxima) {
    if constexpr (Op::ROWS_MULTIPLE > 1) {
        Op::template multiply_block<ADD, STEP>(rows, columns, a, a_row, panel, to, to_row, k);
        for (int i = 0; WITH_MAXIMA && i < rows; i++)
            for (int64_t c = 0; c < columns; c += LANES) maxima[i] = max(load(to + i * to_row + c), maxima[i]);
        return;
    }
    if constexpr (VECTORS == 4) {
        if (columns > 3 * LANES)
            return multiply_rows<Op, 4, ADD, WITH_MAXIMA, STEP>(rows, a, a_row, panel, to, to_row, k, maxima);
        if (columns > 2 * LANES)
            return multiply_rows<Op, 3, ADD, WITH_MAXIMA, STEP>(rows, a, a_row, panel, to, to_row, k, maxima);
    }
    if (columns > LANES)
        return multiply_rows<Op, 2, ADD, WITH_MAXIMA, STEP>(rows, a, a_row, panel, to, to_row, k, maxima);
    multiply_rows<Op, 1, ADD, WITH_MAXIMA, STEP>(rows, a, a_row, panel, to, to_row, k, maxima);
}

// -- packing ---------------------------------------------------------------------------------------

// Transposes a block whose rows are zeros but for the first.
INLINE void scatter(Vector *block) {  // [LANES, LANES]
    Real row[LANES];
    store(row, block[0]);
    for (int n = 0; n < LANES; n++) block[n] = Vector{row[n]};
}

// Packs rows of d numbers as the columns of a panel [depth, PANEL], with zeros up to a whole vector. In float32 they are
// multiplied by a factor. squares [PANEL]: where the squared norm of each row is written, or null.
template <class Op, bool SQUARES, class T>
INLINE void pack_columns(typename Op::Element *to, const T *rows, const int64_t stride[2], int64_t count, int64_t d,
                         Real factor, Real *squares) {
    int64_t units = round_up(d, Op::DEPTH_MULTIPLE) / Op::PAIR;
    for (int64_t j = 0; j < count; j += LANES) {
        Vector square[SQUARES ? LANES : 1];
        for (int64_t n = 0; SQUARES && n < LANES; n++) square[n] = Vector{};
        for (int64_t x = 0; x < units; x += LANES) {
            Vector block[LANES];
            for (int64_t n = 0; n < LANES; n++) {
                block[n] = j + n < count ? Op::units(rows + (j + n) * stride[0], stride[1], x, d) : Vector{};
                if constexpr (SQUARES) square[n] = Op::add(square[n], block[n], block[n]);
            }
            if (Op::PAIR == 1 && factor != (Real)1)
                for (int n = 0; n < LANES; n++) block[n] *= factor;
            if (j + 1 == count) scatter(block);  // which takes less time than transposing a single row
            else transpose(block);
            for (int64_t n = 0; n < smaller<int64_t>(LANES, units - x); n++)
                store((Real *)(to + Op::place(x + n, j)), block[n]);
        }
        if constexpr (SQUARES) store(squares + j, sums(square));
    }
}

template <class Op, class T>
static void pack_columns(typename Op::Element *to, const T *rows, const int64_t stride[2], int64_t count, int64_t d,
                         Real factor = 1, Real *squares = nullptr) {
    squares ? pack_columns<Op, true>(to, rows, stride, count, d, factor, squares)
            : pack_columns<Op, false>(to, rows, stride, count, d, factor, squares);
}

// Packs a query for the left side of a product, times a factor that doesn't round; zeros beyond its end.
template <class Op, class T>
INLINE void pack_query(typename Op::Element *to, const T *row, int64_t step, int64_t d, Real factor) {
    each(d, step, [&](int64_t x, int64_t at) { to[x] = Op::pack(factor * widen(row[at])); });
    for (int64_t x = d; x < round_up(d, Op::DEPTH_MULTIPLE); x++) to[x] = typename Op::Element{};
}

// Returns the dot product of two rows of n numbers.
template <class A, class B> INLINE Real dot(const A *a, int64_t a_step, const B *b, int64_t b_step, int64_t n) {
    Vector products = {};
    for (int64_t x = 0; x < n; x += LANES) products += Single::units(a, a_step, x, n) * Single::units(b, b_step, x, n);
    return sum(products);
}

// Returns the squared norm of a packed query.
template <class Op> INLINE Real squared_norm(const typename Op::Element *row, int64_t d) {
    Vector squares = {};
    for (int64_t x = 0; x * Op::PAIR < d; x += LANES) {
        Vector some = Op::units(row, 1, x, d);
        squares = Op::add(squares, some, some);
    }
    return sum(squares);
}

// Packs rows as the rows of panels [panels of width][PANEL rows, PANEL], which are `apart` numbers from each other; non-finite
// numbers become 0. kinds [PANEL]: the flags of each row.
template <class Op, class T>
static void pack_rows(typename Op::Element *to, int64_t apart, const T *rows, const int64_t stride[2], int64_t count,
                      int64_t width, uint8_t *kinds) {
    int64_t end = round_up(count, Op::DEPTH_MULTIPLE);
    memset(kinds, 0, end);
    for (int64_t a = 0; a * PANEL < width; a++)
        for (int64_t j = 0; j < end; j += Op::PAIR) {
            const T *row = rows + a * PANEL * stride[1] + j * stride[0];
            Op::values(to + a * apart + Op::place(j / Op::PAIR, 0), row, j + 1 < count ? row + stride[0] : nullptr,
                       stride[1], j < count ? smaller<int64_t>(PANEL, width - a * PANEL) : 0, kinds + j);
        }
}

// Returns true if one of them has this flag.
INLINE bool any(const uint8_t *kinds, int64_t count, uint8_t kind) {
    uint8_t joined = 0;
    for (int64_t j = 0; j < count; j++) joined |= kinds[j];
    return joined & kind;
}

// -- problems --------------------------------------------------------------------------------------

struct Interval {
    int64_t begin, end;
};

INLINE int64_t offset_of(const Problem &problem, int64_t b) {
    return problem.offsets ? problem.offsets[b] : problem.offset;
}

// Returns the keys that are visible to query t of sequence b by the band and the lengths; ids, keep and bias may mask more.
INLINE Interval visible_keys(const Problem &problem, int64_t b, int64_t t) {
    int64_t position = offset_of(problem, b) + t;
    int64_t begin = larger<int64_t>(0, position + problem.low),
            end = smaller<int64_t>(problem.s, position + problem.high + 1);
    if (problem.first) begin = larger(begin, problem.first[b]), end = smaller(end, problem.last[b]);
    return {begin, end};
}

// Returns the address of a row of a tensor with these strides.
template <class T> INLINE const T *row_at(const void *x, const int64_t step[4], int64_t b, int64_t h, int64_t row) {
    return (const T *)x + b * step[0] + h * step[1] + row * step[2];
}

// Returns log₂ of a weight, from its score and the running maximum or log-sum-exp. The difference is computed first: it is
// exact where the two are close, and exactly 0 for the largest score, however large that is.
INLINE Vector log2_weight(Vector score, Vector reference) { return (score - reference) * (Real)LOG2E; }

// Turns products into scores with softcap; products times `unit` are scale · q·k. All passes call this, so that their scores
// have the same bits. cap_slope: where the derivative of the softcap is written, or null.
INLINE void scale_and_cap(const Problem &problem, Real unit, Real *score, Real *cap_slope, int64_t count) {
    if (unit != (Real)1)
        for (int64_t n = 0; n < count; n += LANES) store(score + n, unit * load(score + n));
    if (!problem.softcap) return;
    for (int64_t n = 0; n < count; n += LANES) {
        Vector capped = tanh(load(score + n) * (Real)(1 / problem.softcap));
        store(score + n, (Real)problem.softcap * capped);
        if (cap_slope) store(cap_slope + n, (Real)1 - capped * capped);
    }
}

// Applies bias and mask to a line of count scores, of which `real` exist: of query t and the keys from s on (ALONG 3), or of
// key s and the queries from t on (ALONG 2). `visible` are the keys or queries that band and lengths don't mask.
template <int ALONG>
static void apply_bias_and_mask(const Problem &problem, Real *score, int64_t b, int64_t h, int64_t t, int64_t s,
                                int64_t real, int64_t count, Interval visible) {
    if (problem.slopes) {
        Real slope = ((const Real *)problem.slopes)[h * problem.slopes_stride];
        int64_t away = s - t - offset_of(problem, b);
        for (int64_t first = 0; first < real; first += LANES) {
            Real distance[LANES];
            for (int64_t n = 0; n < LANES; n++)
                distance[n] = std::fabs((Real)(ALONG == 3 ? away + first + n : away - first - n));
            store(score + first, load(score + first) - rounded(slope * load(distance)));
        }
    }
    if (problem.bias) {
        const Real *bias = row_at<Real>(problem.bias, problem.bias_stride, b, h, t) + s * problem.bias_stride[3];
        each(real, problem.bias_stride[ALONG], [&](int64_t n, int64_t at) {
            Real x = bias[at];
            score[n] = x == -INF ? -INF : score[n] + x;
        });
    }
    if (problem.key_ids) {
        const int64_t *queries = problem.query_ids + b * problem.query_ids_stride + t,
                      *keys = problem.key_ids + b * problem.key_ids_stride + s;
        const int64_t id = ALONG == 3 ? *queries : *keys, *ids = ALONG == 3 ? keys : queries;
        for (int64_t n = 0; n < real; n++) score[n] = ids[n] == id ? score[n] : -INF;
    }
    if (problem.keep) {
        const uint8_t *keep = row_at<uint8_t>(problem.keep, problem.keep_stride, b, h, t) + s * problem.keep_stride[3];
        each(real, problem.keep_stride[ALONG], [&](int64_t n, int64_t at) { score[n] = keep[at] ? score[n] : -INF; });
    }
    int64_t first = ALONG == 3 ? s : t;
    int64_t begin = smaller(larger<int64_t>(visible.begin - first, 0), count);
    int64_t end = larger(smaller(visible.end - first, count), begin);
    for (int64_t n = 0; n < begin; n++) score[n] = -INF;
    for (int64_t n = end; n < count; n++) score[n] = -INF;
}

// -- memory and threads ------------------------------------------------------------------------------

// Arrays that are allocated together, one after the other, from `scratch` or `call_storage`.
template <class X> struct Array {
    X *&place;
    int64_t count;
    int64_t bytes() const { return round_up(count * (int64_t)sizeof(X), 64); }
};
template <class X> INLINE Array<X> array(X *&place, int64_t count) { return {place, count}; }
template <class... X> INLINE void allocate(void *(*memory)(int64_t), Array<X>... arrays) {
    char *next = (char *)memory((arrays.bytes() + ...));
    ((arrays.place = (X *)next, next += arrays.bytes()), ...);
}

// Runs work() on this number of threads, one of which is the caller's, and returns when all are done.
template <class Op, class F> INLINE void run_on(int64_t threads, F work) {
    parallel(
        threads,
        [](void *data) {
            [[maybe_unused]] typename Op::Session session;
            (*(F *)data)();
        },
        &work);
}

// Returns the number of threads to use for this number of operations, in this many pieces. For few operations, waking threads
// takes longer than it saves.
constexpr double WORTH_A_THREAD = 3e5;  // about 10 µs
INLINE int64_t threads_for(const Problem &problem, double operations, int64_t pieces = INT64_MAX) {
    return operations < WORTH_A_THREAD * problem.threads ? 1 : smaller(problem.threads, pieces);
}

// Calls f(n) for every n < count that no other thread has taken.
template <class F> INLINE void take_each(int64_t &next, int64_t count, F f) {
    for (int64_t n; (n = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) f(n);
}

// Calls f with a number of the problem's dtype and the type of its products.
template <class F> INLINE auto with_types(const Problem &problem, F f) {
#if defined(REAL)
    (void)problem;
#else
    if (problem.dtype == FLOAT16) return f(Float16(), Single());
    if (problem.dtype == BFLOAT16) return f(BFloat16(), BFloat16Products());
#endif
    return f(Real(), Single());
}

}  // namespace

// The name of a function in this build.
#define JOIN(name, level) name##_##level
#define JOIN_VALUES(name, level) JOIN(name, level)
#define OF_BUILD(name) JOIN_VALUES(name, LEVEL)
