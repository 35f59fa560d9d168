// Numbers, how they lie in panels, and products of a few rows by a panel, whose sums stay in registers: what the
// kernel and its gradient are made of.
#pragma once
#include "problem.h"
#include "tiles.h"
#include "vectors.h"

#include <cmath>

void *scratch(int64_t bytes);   // memory of this thread, aligned, kept until its next call
void *store_of(int64_t bytes);  // the same, a second one
void forget();                  // the second one is needed no more, and kept only if it isn't large
int64_t near_cache();           // bytes of the second-level cache of a core

namespace {

constexpr int STRIP = 6;                                   // rows in one product
constexpr int VECTORS = BYTES == 64 ? 4 : 2, PANEL = VECTORS * W;  // keys, or columns of values, in a panel
#if defined(REAL)
typedef long double Wide;
#else
typedef double Wide;
#endif
constexpr Wide LOG2E = 1.44269504088896340736L;
constexpr R INF = __builtin_inf();

template <class T> INLINE T smaller(T a, T b) { return a < b ? a : b; }
template <class T> INLINE T larger(T a, T b) { return a > b ? a : b; }
// f(j, where it lies) of so many numbers: in a loop of its own where they lie side by side, which compilers like.
template <class F> INLINE void each(int64_t count, int64_t step, F f) {
    if (step == 1)
        for (int64_t j = 0; j < count; j++) f(j, j);
    else
        for (int64_t j = 0; j < count; j++) f(j, j * step);
}
INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

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

INLINE uint32_t bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float from_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE bool finite(R x) { return x - x == 0; }

struct Half { uint16_t u; };   // float16
struct Brain { uint16_t u; };  // bfloat16

INLINE R wide(R x) { return x; }
INLINE float wide(Brain x) { return from_bits((uint32_t)x.u << 16); }
INLINE float wide(Half x) {
    uint32_t sign = (uint32_t)(x.u & 0x8000) << 16, rest = x.u & 0x7fff;
    float small = (float)rest * 5.9604644775390625e-08f;              // below 2^-14: rest * 2^-24
    float usual = from_bits((rest << 13) + 0x38000000);
    float large = from_bits((rest << 13) | 0x7f800000);                // infinity, NaN
    float y = rest < 0x0400 ? small : rest < 0x7c00 ? usual : large;
    return from_bits(bits(y) | sign);
}

// W numbers that lie side by side.
INLINE V wide(const R *x) { return load(x); }
#if !defined(REAL)
INLINE I whole(const void *x) {
    typedef uint16_t Short __attribute__((vector_size(2 * W)));
    Short u;
    memcpy(&u, x, sizeof u);
    return __builtin_convertvector(u, I);
}
INLINE V wide(const Brain *x) { return (V)(whole(x) << 16); }
INLINE V wide(const Half *x) {
    I u = whole(x), sign = (u & 0x8000) << 16, rest = u & 0x7fff;
    V small = __builtin_convertvector(rest, V) * 5.9604644775390625e-08f;
    I y = rest < 0x0400 ? (I)small : rest < 0x7c00 ? (rest << 13) + 0x38000000 : (rest << 13) | 0x7f800000;
    return (V)(y | sign);
}
#endif

INLINE void narrow(R x, R &y) { y = x; }
INLINE void narrow(float x, Brain &y) {  // to the nearest, ties to even
    uint32_t u = bits(x);
    y.u = x != x ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
INLINE void narrow(float x, Half &y) {
    uint32_t u = bits(x), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
    if (rest >= 0x47800000) {  // 2^16 and more: infinity, or NaN
        y.u = sign | (rest > 0x7f800000 ? 0x7e00 : 0x7c00);
    } else if (rest < 0x38800000) {  // below 2^-14: a whole number of 2^-24
        float lifted = from_bits(rest) + 0.5f;  // 2^-1, whose last bit is 2^-24: rounds to even
        y.u = sign | (bits(lifted) - 0x3f000000);
    } else {
        y.u = sign | ((rest + 0xfff + ((rest >> 13) & 1) - 0x38000000) >> 13);
    }
}

// A vector, and the first `count` numbers of one.
template <class T> INLINE void narrow(V v, T *to) {
    for (int n = 0; n < W; n++) narrow(v[n], to[n]);
}
INLINE void narrow(V v, R *to) { store(to, v); }
#if !defined(REAL)
INLINE I brains(V v) {  // to the nearest bfloat16, ties to even
    U u = (U)v, even = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return v != v ? I{} + 0x7fc0 : (I)even;
}
INLINE void narrow(V v, Brain *to) {
    typedef uint16_t Short __attribute__((vector_size(2 * W)));
    Short u = __builtin_convertvector((U)brains(v), Short);
    memcpy(to, &u, sizeof u);
}
#endif
template <class T> INLINE void narrow(V v, T *to, int64_t count) {
    if (count == W) return narrow(v, to);
    for (int64_t n = 0; n < count; n++) narrow(v[n], to[n]);
}

// -- products --------------------------------------------------------------------------------------

// What the packed numbers of a key's value are: bits that are put together.
constexpr uint8_t INFINITE = 1;  // some are infinite or NaN, and 0 in the panel
constexpr uint8_t EXTREME = 2;   // some are so large or small that their product with a large weight isn't exact
#if !defined(REAL)
constexpr R EXTREME_FROM = 0x1p32f;  // or below its inverse, but for 0
#endif

// How numbers lie in a panel and are multiplied: one by one in float32, or by pairs or tiles in bfloat16. A panel is
// [k / PAIR][PANEL][PAIR]; a row on the left [k]. What a product reads is rounded up to DEPTH along k, where it must be
// 0, and to EVEN rows on the left, which may hold anything; as many rows of the result are written.
struct Single {
    typedef R E;
    struct Ready {};  // what a thread holds while it multiplies
    // W units (numbers, or pairs of them) of a row of n numbers, from unit x; zeros beyond its end.
    template <class T> INLINE V units(const T *row, int64_t step, int64_t x, int64_t n) {
        if (step == 1 && x + W <= n) return wide(row + x);
        R at[W];
        for (int j = 0; j < W; j++) at[j] = x + j < n ? wide(row[(x + j) * step]) : (R)0;
        return load(at);
    }
    // A row of values for a panel, where what isn't finite is 0; what it is joins `kind`.
    template <class T>
    INLINE void values(R *to, const T *row, const T *, int64_t step, int64_t width, uint8_t *kind) {
        I infinite = {}, extreme = {};
        for (int64_t x = 0; x < PANEL; x += W) {
            V v = x < width ? units(row, step, x, width) : V{};
            I fine = v - v == (R)0;
            infinite |= ~fine;
#if defined(HAS_EXP)
            V size = v < 0 ? -v : v;
            extreme |= (size > EXTREME_FROM) | ((size < 1 / EXTREME_FROM) & (v != 0));
#endif
            store(to + x, (V)((I)v & fine));
        }
        *kind |= (lanes(infinite) ? INFINITE : 0) | (lanes(extreme) ? EXTREME : 0);
    }
    static constexpr int PAIR = 1, DEPTH = 1, EVEN = 1, KEYS = 256;  // KEYS in a step
    INLINE R pack(R x) { return x; }
    INLINE R unpack(R x) { return x; }
    INLINE V left(const R *a) { return all(*a); }
    INLINE V right(const R *b) { return load(b); }
    INLINE V add(V sum, V a, V b) { return sum + a * b; }
    INLINE void weights(R *to, V p, V r) { store(to, p); store(to + W, r); }
    INLINE void round(R *to, V v) { store(to, v); }
};

#if defined(__AVX512BF16__) || defined(EMULATE_TILES)
struct Pairs {
    typedef Brain E;
    struct Ready {};
    INLINE V units(const Brain *row, int64_t step, int64_t x, int64_t n) {
        Brain at[2 * W] = {};
        if (step == 1 && 2 * (x + W) <= n)
            memcpy(at, row + 2 * x, BYTES);
        else
            for (int64_t j = 0; j < 2 * W && 2 * x + j < n; j++) at[j] = row[(2 * x + j) * step];
        V v;
        memcpy(&v, at, BYTES);
        return v;
    }
    // Two rows of values, pair by pair; the second may be null.
    INLINE void values(Brain *to, const Brain *row, const Brain *second, int64_t step, int64_t width, uint8_t *kind) {
        uint32_t pairs[PANEL] = {}, least[2] = {~0u, ~0u}, most[2] = {};
        for (int64_t x = 0; x < width; x++) {
            uint32_t a = row[x * step].u, b = second ? second[x * step].u : 0;
            uint32_t size_a = a & 0x7fff, size_b = b & 0x7fff;
            pairs[x] = (size_a < 0x7f80 ? a : 0) | (size_b < 0x7f80 ? b : 0) << 16;
            least[0] = smaller(least[0], size_a - 1), least[1] = smaller(least[1], size_b - 1);  // of 0 the largest number
            most[0] = larger(most[0], size_a), most[1] = larger(most[1], size_b);
        }
        memcpy(to, pairs, sizeof pairs);
        const uint32_t low = bits(1 / EXTREME_FROM) >> 16, high = bits(EXTREME_FROM) >> 16;
        for (int n = 0; n < (second ? 2 : 1); n++)
            kind[n] |= (most[n] >= 0x7f80 ? INFINITE : 0) | (most[n] > high || least[n] < low - 1 ? EXTREME : 0);
    }
    static constexpr int PAIR = 2, DEPTH = 2, EVEN = 1, KEYS = 512;
    INLINE Brain pack(R x) { Brain y; narrow(x, y); return y; }
    INLINE R unpack(Brain x) { return wide(x); }
    INLINE V left(const Brain *a) { int32_t x; memcpy(&x, a, 4); return (V)(I{} + x); }
    INLINE V right(const Brain *b) { return load((const R *)b); }
#if defined(__AVX512BF16__)
    INLINE V add(V sum, V a, V b) { return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
    INLINE I narrowed(V v) { return (I)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)); }
    INLINE void weights(Brain *to, V p, V r) {
        __m512bh both = _mm512_cvtne2ps_pbh((__m512)r, (__m512)p);
        memcpy(to, &both, 64);
    }
    INLINE void round(Brain *to, V v) {
        __m256bh half = _mm512_cvtneps_pbh((__m512)v);
        memcpy(to, &half, 32);
    }
#else
    INLINE V add(V sum, V a, V b) {
        sum += (V)((I)a << 16) * (V)((I)b << 16);
        return sum + (V)((I)a & -65536) * (V)((I)b & -65536);
    }
    INLINE I narrowed(V v) { return brains(v); }
    INLINE void weights(Brain *to, V p, V r) { round(to, p), round(to + W, r); }
    INLINE void round(Brain *to, V v) {
        I u = narrowed(v);
        for (int n = 0; n < W; n++) to[n].u = (uint16_t)u[n];
    }
#endif
    INLINE void pair(Brain *to, V a, V b) {  // of two rows, number by number
        I both = narrowed(a) | narrowed(b) << 16;
        memcpy(to, &both, BYTES);
    }
};
#endif

#if defined(TILES)
// Tiles of 16 rows of 64 bytes, of which the processor multiplies two at a time (AMX): the sums of 32 rows and 32 columns
// stay in four of them. Their layout is that of pairs.
struct Tiles : Pairs {
    static constexpr int DEPTH = 32, EVEN = 16, KEYS = 128;
    typedef TilesReady Ready;

    // to [32 or 16 rows, 16 or 32 columns] (+)= a · panel
    template <int ROWS, int COLUMNS, bool ADD, int STEP>
    INLINE void block(const Brain *a, int64_t a_row, const Brain *panel, R *to, int64_t to_row, int64_t k) {
        constexpr int64_t across = 16 * PAIR;  // numbers from a tile of a panel to that beside it
        int64_t a_step = a_row * sizeof(Brain), step = STEP * PAIR * sizeof(Brain), to_step = to_row * sizeof(R);
        const Brain *b = a + 16 * a_row;
        R *low = to + 16 * to_row;
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
        for (int64_t x = 0; x < k; x += DEPTH) {
            tile_load<4>(a + x, a_step), tile_load<6>(panel + x * STEP, step);
            tile_multiply<0, 4, 6>();
            if (COLUMNS == 2) tile_load<7>(panel + x * STEP + across, step), tile_multiply<1, 4, 7>();
            if (ROWS == 2) tile_load<5>(b + x, a_step), tile_multiply<2, 5, 6>();
            if (ROWS == 2 && COLUMNS == 2) tile_multiply<3, 5, 7>();
        }
        tile_store<0>(to, to_step);
        if (COLUMNS == 2) tile_store<1>(to + 16, to_step);
        if (ROWS == 2) tile_store<2>(low, to_step);
        if (ROWS == 2 && COLUMNS == 2) tile_store<3>(low + 16, to_step);
    }

    template <bool ADD, int STEP>
    static void product(int rows, int64_t columns, const Brain *a, int64_t a_row, const Brain *panel, R *to,
                        int64_t to_row, int64_t k) {
        for (int i = 0; i < rows; i += 32, a += 32 * a_row, to += 32 * to_row) {
            bool two = rows - i > 16;
            for (int64_t c = 0; c < columns; c += 32) {
                const Brain *b = panel + c * PAIR;
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
typedef Tiles Brains;
#elif defined(__AVX512BF16__)
typedef Pairs Brains;
#else
typedef Single Brains;
#endif

// to [H, N vectors] (+)= a [H, k] * panel [k, N vectors]; with TOP the highest of each row's entries joins top.
// STEP: from one number of a panel to the next along k.
template <class Op, int H, int N, bool ADD, bool TOP, int STEP>
INLINE void product(const typename Op::E *a, int64_t a_row, const typename Op::E *panel, R *to, int64_t to_row,
                    int64_t k, V *top) {
    V sum[H][N];
    for (int i = 0; i < H; i++)
        for (int n = 0; n < N; n++) sum[i][n] = ADD ? load(to + i * to_row + n * W) : V{};
    for (int64_t x = 0; x < k; x += Op::PAIR) {
        V b[N];
        for (int n = 0; n < N; n++) b[n] = Op::right(panel + x * STEP + n * W * Op::PAIR);
#pragma GCC unroll 6
        for (int i = 0; i < H; i++) {
            V one = Op::left(a + i * a_row + x);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sum[i][n] = Op::add(sum[i][n], one, b[n]);
        }
    }
    for (int i = 0; i < H; i++) {
        for (int n = 0; n < N; n++) store(to + i * to_row + n * W, sum[i][n]);
        if (TOP)
            for (int n = 0; n < N; n++) top[i] = max(sum[i][n], top[i]);
    }
}

template <class Op, int N, bool ADD, bool TOP, int STEP>
static void rows_of(int rows, const typename Op::E *a, int64_t a_row, const typename Op::E *panel, R *to,
                    int64_t to_row, int64_t k, V *top) {
    int i = 0;
    for (; i + STRIP <= rows; i += STRIP)
        product<Op, STRIP, N, ADD, TOP, STEP>(a + i * a_row, a_row, panel, to + i * to_row, to_row, k, top + i);
    a += i * a_row, to += i * to_row, top += i;
    switch (rows - i) {
        case 5: return product<Op, 5, N, ADD, TOP, STEP>(a, a_row, panel, to, to_row, k, top);
        case 4: return product<Op, 4, N, ADD, TOP, STEP>(a, a_row, panel, to, to_row, k, top);
        case 3: return product<Op, 3, N, ADD, TOP, STEP>(a, a_row, panel, to, to_row, k, top);
        case 2: return product<Op, 2, N, ADD, TOP, STEP>(a, a_row, panel, to, to_row, k, top);
        case 1: return product<Op, 1, N, ADD, TOP, STEP>(a, a_row, panel, to, to_row, k, top);
    }
}

// The same for a panel of which only so many columns are wanted.
template <class Op, bool ADD, bool TOP, int STEP = PANEL>
static void columns_of(int rows, int64_t columns, const typename Op::E *a, int64_t a_row, const typename Op::E *panel,
                       R *to, int64_t to_row, int64_t k, V *top) {
    if constexpr (Op::EVEN > 1) {
        Op::template product<ADD, STEP>(rows, columns, a, a_row, panel, to, to_row, k);
        for (int i = 0; TOP && i < rows; i++)
            for (int64_t c = 0; c < columns; c += W) top[i] = max(load(to + i * to_row + c), top[i]);
        return;
    }
    if constexpr (VECTORS == 4) {
        if (columns > 3 * W) return rows_of<Op, 4, ADD, TOP, STEP>(rows, a, a_row, panel, to, to_row, k, top);
        if (columns > 2 * W) return rows_of<Op, 3, ADD, TOP, STEP>(rows, a, a_row, panel, to, to_row, k, top);
    }
    if (columns > W) return rows_of<Op, 2, ADD, TOP, STEP>(rows, a, a_row, panel, to, to_row, k, top);
    rows_of<Op, 1, ADD, TOP, STEP>(rows, a, a_row, panel, to, to_row, k, top);
}

// -- packing ---------------------------------------------------------------------------------------

// A panel [depth, PANEL] of rows of d numbers, which become its columns; zeros up to a whole vector. In float32 they
// are multiplied by a factor. squares [PANEL]: where the product of each row with itself is written, or null.
template <class Op, class T>
static void pack_columns(typename Op::E *to, const T *rows, const int64_t stride[2], int64_t count, int64_t d,
                         R factor = 1, R *squares = nullptr) {
    int64_t units = up(d, Op::DEPTH) / Op::PAIR;
    for (int64_t j = 0; j < count; j += W) {
        V square[W];
        for (int64_t n = 0; n < W; n++) square[n] = V{};
        for (int64_t x = 0; x < units; x += W) {
            V block[W];
            for (int64_t n = 0; n < W; n++) {
                block[n] = j + n < count ? Op::units(rows + (j + n) * stride[0], stride[1], x, d) : V{};
                square[n] = Op::add(square[n], block[n], block[n]);
            }
            if (Op::PAIR == 1 && factor != (R)1)
                for (int n = 0; n < W; n++) block[n] *= factor;
            transpose(block);
            for (int64_t n = 0; n < smaller<int64_t>(W, units - x); n++)
                store((R *)to + (x + n) * PANEL + j, block[n]);
        }
        if (squares) store(squares + j, sums(square));
    }
}

// A query for the left of a product, times a factor that its numbers hold exactly; zeros beyond its end.
template <class Op, class T>
INLINE void pack_query(typename Op::E *to, const T *row, int64_t step, int64_t d, R factor) {
    each(d, step, [&](int64_t x, int64_t at) { to[x] = Op::pack(factor * wide(row[at])); });
    for (int64_t x = d; x < up(d, Op::DEPTH); x++) to[x] = typename Op::E{};
}

// The product of a packed query with itself.
template <class Op> INLINE R squared(const typename Op::E *row, int64_t d) {
    V squares = {};
    for (int64_t x = 0; x * Op::PAIR < d; x += W) {
        V some = Op::units(row, 1, x, d);
        squares = Op::add(squares, some, some);
    }
    return sum(squares);
}

// The same rows as rows of panels [across][up to PANEL rows, PANEL], `apart` from one to the next; what isn't finite
// is 0 there. kinds [count]: what each row is.
template <class Op, class T>
static void pack_rows(typename Op::E *to, int64_t apart, const T *rows, const int64_t stride[2], int64_t count,
                      int64_t width, uint8_t *kinds) {
    memset(kinds, 0, count);
    for (int64_t a = 0; a * PANEL < width; a++) {
        typename Op::E *panel = to + a * apart;
        for (int64_t j = 0; j < count; j += Op::PAIR) {
            const T *row = rows + a * PANEL * stride[1] + j * stride[0];
            Op::values(panel + j * PANEL, row, j + 1 < count ? row + stride[0] : nullptr, stride[1],
                       smaller<int64_t>(PANEL, width - a * PANEL), kinds + j);
        }
        int64_t end = up(count, Op::PAIR);
        memset(panel + end * PANEL, 0, sizeof(*to) * (up(count, Op::DEPTH) - end) * PANEL);
    }
}

// Is one of them such?
INLINE bool any(const uint8_t *kinds, int64_t count, uint8_t kind) {
    uint8_t all = 0;
    for (int64_t j = 0; j < count; j++) all |= kinds[j];
    return all & kind;
}

// -- problems --------------------------------------------------------------------------------------

struct Interval { int64_t begin, end; };

INLINE int64_t offset_of(const Problem &p, int64_t b) { return p.offsets ? p.offsets[b] : p.offset; }

// The keys that query t of sequence b may see by the band and the lengths; ids, keep and bias may mask more.
INLINE Interval visible_keys(const Problem &p, int64_t b, int64_t t) {
    int64_t position = offset_of(p, b) + t;
    int64_t begin = larger<int64_t>(0, position + p.low), end = smaller<int64_t>(p.s, position + p.high + 1);
    if (p.first) begin = larger(begin, p.first[b]), end = smaller(end, p.last[b]);
    return {begin, end};
}

// Where a row of a tensor of strides `step` lies.
template <class T> INLINE const T *at(const void *x, const int64_t step[4], int64_t b, int64_t h, int64_t row) {
    return (const T *)x + b * step[0] + h * step[1] + row * step[2];
}

// A weight as a power of 2, from its score and the running maximum or log-sum-exp. The difference comes first: it is
// exact where the two are close, and exactly 0 for the largest score, however large that is.
INLINE V exponent(V score, V ground) { return (score - ground) * (R)LOG2E; }

// Products, which times `unit` are scale · q·k, become scores with softcap. Every pass over a problem makes them so,
// with the same bits. bend: the derivative of the softcap is written there, or null.
INLINE void soften(const Problem &p, R unit, R *score, R *bend, int64_t count) {
    if (unit != (R)1)
        for (int64_t n = 0; n < count; n += W) store(score + n, unit * load(score + n));
    if (!p.softcap) return;
    for (int64_t n = 0; n < count; n += W) {
        V bent = tanh(load(score + n) * (R)(1 / p.softcap));
        store(score + n, (R)p.softcap * bent);
        if (bend) store(bend + n, (R)1 - bent * bent);
    }
}

// Bias and mask on a line of scores: of query t and the keys from s on (ALONG 3), or of key s and the queries from t
// on (ALONG 2). Of count scores so many are real, and those in `seen` are let through by band and lengths.
template <int ALONG>
static void constrain(const Problem &p, R *score, int64_t b, int64_t h, int64_t t, int64_t s, int64_t real,
                      int64_t count, Interval seen) {
    if (p.slopes) {
        R slope = ((const R *)p.slopes)[h * p.slopes_stride];
        int64_t away = s - t - offset_of(p, b);
        for (int64_t first = 0; first < real; first += W) {
            R lean[W];
            for (int64_t n = 0; n < W; n++) lean[n] = std::fabs((R)(ALONG == 3 ? away + first + n : away - first - n));
            store(score + first, load(score + first) - rounded(slope * load(lean)));
        }
    }
    if (p.bias) {
        const R *bias = at<R>(p.bias, p.bias_stride, b, h, t) + s * p.bias_stride[3];
        each(real, p.bias_stride[ALONG], [&](int64_t n, int64_t at) {
            R x = bias[at];
            score[n] = x == -INF ? -INF : score[n] + x;
        });
    }
    if (p.key_ids) {
        const int64_t *queries = p.query_ids + b * p.query_ids_stride + t, *keys = p.key_ids + b * p.key_ids_stride + s;
        const int64_t own = ALONG == 3 ? *queries : *keys, *ids = ALONG == 3 ? keys : queries;
        for (int64_t n = 0; n < real; n++) score[n] = ids[n] == own ? score[n] : -INF;
    }
    if (p.keep) {
        const uint8_t *keep = at<uint8_t>(p.keep, p.keep_stride, b, h, t) + s * p.keep_stride[3];
        each(real, p.keep_stride[ALONG], [&](int64_t n, int64_t at) { score[n] = keep[at] ? score[n] : -INF; });
    }
    int64_t first = ALONG == 3 ? s : t;
    int64_t begin = smaller(larger<int64_t>(seen.begin - first, 0), count);
    int64_t end = larger(smaller(seen.end - first, count), begin);
    for (int64_t n = 0; n < begin; n++) score[n] = -INF;
    for (int64_t n = end; n < count; n++) score[n] = -INF;
}

// -- memory and threads ------------------------------------------------------------------------------

// Arrays of so many elements, one behind the other, from `scratch` or `store_of`.
template <class X> struct Array {
    X *&place;
    int64_t count;
    int64_t bytes() const { return up(count * (int64_t)sizeof(X), 64); }
};
template <class X> INLINE Array<X> array(X *&place, int64_t count) { return {place, count}; }
template <class... X> INLINE void allocate(void *(*memory)(int64_t), Array<X>... arrays) {
    char *next = (char *)memory((arrays.bytes() + ...));
    ((arrays.place = (X *)next, next += arrays.bytes()), ...);
}

// f(n) of what no other thread took, until all `count` are taken.
template <class F> INLINE void share(int64_t &next, int64_t count, F f) {
    for (int64_t n; (n = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) f(n);
}

}  // namespace
