// Vectors of the width that a file is compiled for, of float or, in the build for float64, of double (REAL).
//
// Arithmetic and comparisons use the compilers' vector types, with the same source for AVX-512, AVX2 and others.
// Intrinsics are used only for what these types can't express, or if compilers generate slow code.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(REAL)
typedef REAL Real;
typedef int64_t Integer;
typedef uint64_t Unsigned;
constexpr int BYTES = 16;
#else
typedef float Real;
typedef int32_t Integer;
typedef uint32_t Unsigned;
#if defined(__AVX512F__)
#define VECTORS_512
constexpr int BYTES = 64;
#elif defined(EMULATE_TILES)  // which have rows of 64 bytes
constexpr int BYTES = 64;
#elif defined(__AVX2__)
#define VECTORS_256
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
#endif

constexpr int LANES = BYTES / sizeof(Real);  // the numbers in a vector
constexpr int FRACTION_BITS = sizeof(Real) == 4 ? 23 : 52,
              LEAST_EXPONENT =
                  sizeof(Real) == 4 ? -126 : -1022;  // bits of the fraction, and the least exponent, of the format

typedef Real Vector __attribute__((vector_size(BYTES)));
typedef Integer Integers __attribute__((vector_size(BYTES)));
typedef Unsigned Unsigneds __attribute__((vector_size(BYTES)));

#define INLINE_METHOD inline __attribute__((always_inline))
#define INLINE static INLINE_METHOD

template <class X> INLINE X read(const void *from) {  // which may be unaligned
    X x;
    memcpy(&x, from, sizeof x);
    return x;
}
INLINE Vector load(const Real *x) { return read<Vector>(x); }
INLINE void store(Real *x, Vector v) { memcpy(x, &v, BYTES); }
INLINE Vector broadcast(Real x) { return x - Vector{}; }

// Hides from the compiler how a value was computed, so that it can't be simplified.
#if defined(__x86_64__) && !defined(EMULATE_TILES)
#define OPAQUE(v) __asm__ volatile("" : "+v"(v))
#elif defined(__aarch64__) && !defined(EMULATE_TILES)
#define OPAQUE(v) __asm__ volatile("" : "+w"(v))
#else
#define OPAQUE(v) __asm__ volatile("" : "+m"(v))
#endif

// Returns a rounded product. Without this, a compiler may fuse it with the addition that follows, and not round it.
INLINE Vector rounded(Vector product) {
    OPAQUE(product);
    return product;
}

INLINE Vector max(Vector a, Vector b) {  // b if a or b is NaN
#if defined(VECTORS_512)
    return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(VECTORS_256)
    return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

INLINE Vector shuffle(Vector a, Vector b, Integers from) {  // b's numbers are counted after a's
#if defined(__clang__)
    Vector v;
    for (int n = 0; n < LANES; n++) v[n] = from[n] < LANES ? a[from[n]] : b[from[n] - LANES];
    return v;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

// A stage of transposing: blocks of STEP rows and columns change places.
template <int STEP> INLINE void transpose_stage(Vector *rows) {
    Integers low, high;
    for (int n = 0; n < LANES; n++) {
        low[n] = n & STEP ? n - STEP + LANES : n;
        high[n] = n & STEP ? n + LANES : n + STEP;
    }
    for (int i = 0; i < LANES; i++) {
        if (i & STEP) continue;
        Vector a = rows[i], b = rows[i + STEP];
        rows[i] = shuffle(a, b, low);
        rows[i + STEP] = shuffle(a, b, high);
    }
}

INLINE void transpose(Vector *rows) {  // [LANES, LANES]
    if constexpr (LANES > 8) transpose_stage<LANES / 2>(rows);
    if constexpr (LANES > 4) transpose_stage<4>(rows);
    if constexpr (LANES > 2) transpose_stage<2>(rows);
    transpose_stage<1>(rows);
}

// Reduces each row to one number by a function of two, such as a sum: in each stage two rows become one.
template <int STEP, class F> INLINE void fold_stage(Vector *rows, F both) {
    Integers low, high;
    for (int n = 0; n < LANES; n++) {
        low[n] = n & STEP ? n - STEP + LANES : n;
        high[n] = n & STEP ? n + LANES : n + STEP;
    }
    for (int i = 0; i < STEP; i++)
        rows[i] = both(shuffle(rows[i], rows[i + STEP], low), shuffle(rows[i], rows[i + STEP], high));
}

template <class F> INLINE Vector fold(Vector *rows, F both) {  // [LANES, LANES] → [LANES]; overwrites the rows
    if constexpr (LANES > 8) fold_stage<LANES / 2>(rows, both);
    if constexpr (LANES > 4) fold_stage<4>(rows, both);
    if constexpr (LANES > 2) fold_stage<2>(rows, both);
    fold_stage<1>(rows, both);
    return rows[0];
}

INLINE Vector sums(Vector *rows) {
    return fold(rows, [](Vector a, Vector b) { return a + b; });
}
INLINE Vector maxima(Vector *rows) {
    return fold(rows, [](Vector a, Vector b) { return max(a, b); });
}

// Reduces a vector to one number by a function of two, such as a sum.
template <int STEP, class F> INLINE Real reduce(Vector v, F both) {
    Integers from;
    for (int n = 0; n < LANES; n++) from[n] = n ^ STEP;
    v = both(v, shuffle(v, v, from));
    if constexpr (STEP > 1) return reduce<STEP / 2>(v, both);
    return v[0];
}

INLINE Real maximum(Vector v) {
    return reduce<LANES / 2>(v, [](Vector a, Vector b) { return max(a, b); });
}
INLINE Real sum(Vector v) {
    return reduce<LANES / 2>(v, [](Vector a, Vector b) { return a + b; });
}

INLINE uint32_t bit_mask(Integers where) {  // a bit for each lane of a comparison
#if defined(VECTORS_512)
    return _mm512_movepi32_mask((__m512i)where);
#elif defined(VECTORS_256)
    return _mm256_movemask_ps((__m256)where);
#else
    uint32_t bits = 0;
    for (int n = 0; n < LANES; n++) bits |= (uint32_t)(where[n] != 0) << n;
    return bits;
#endif
}

INLINE uint32_t at_least(Vector x, Real bar) {  // a bit for each lane that is >= bar
#if defined(VECTORS_512)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(bar), _CMP_GE_OQ);
#else
    return bit_mask(x >= bar);
#endif
}

INLINE Vector round_to_integer(Vector x) {  // |x| must be small
#if defined(VECTORS_512)
    return (Vector)_mm512_roundscale_ps((__m512)x, 0);
#elif defined(VECTORS_256)
    return (Vector)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Real shift = (Real)1.5 * ((Integer)1 << FRACTION_BITS);  // numbers of this size have no fraction
    Vector y = x + shift;
    __asm__("" : "+m"(y));  // so that the compiler doesn't simplify y - shift
    return y - shift;
#endif
}

// Returns 2^f for |f| <= 1/2, exactly 1 at 0: a minimax polynomial (relative error 9e-8), or the series (4e-18).
INLINE Vector exp2_fraction(Vector f) {
#if defined(REAL)
    Vector power = {};
    Real factor[14] = {1};
    for (int n = 1; n < 14; n++) factor[n] = factor[n - 1] * (Real)0.69314718055994530942 / n;
    for (int n = 13; n >= 0; n--) power = power * f + factor[n];
    return power;
#else
    Vector power = f * 0.001326472731307149f + 0.009671512991189957f;
    power = power * f + 0.05550733581185341f;
    power = power * f + 0.24022242426872253f;
    power = power * f + 0.6931470036506653f;
    return power * f + 1.f;
#endif
}

// Returns 2^x for x <= 0: exactly 0 below the normal numbers of the format, NaN for NaN.
INLINE Vector exp2(Vector x) {
    Vector n = round_to_integer(x), power = exp2_fraction(x - n);
#if defined(VECTORS_512)
    __mmask16 some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(LEAST_EXPONENT), _CMP_NLT_UQ);
    return (Vector)_mm512_maskz_scalef_ps(some, (__m512)power, (__m512)n);
#else
    Unsigneds exponent = (Unsigneds) __builtin_convertvector(n, Integers)
                         << FRACTION_BITS;  // wrong only in lanes that become 0
    return x < (Real)LEAST_EXPONENT ? Vector{} : (Vector)((Unsigneds)power + exponent);
#endif
}

// `exp` needs fused multiply-adds, which don't round the product.
#if !defined(REAL) && (defined(__FMA__) || defined(__aarch64__))
#define HAS_EXP

// Returns e^x for |x| <= EXP_MOST with an error of 1.4 u and 0.22 u·|x|, mostly that of log₂(e) in float. It is small enough
// for a row's log-sum-exp without subtracting the maximum first. 2^f is a polynomial of relative error 2e-9.
constexpr Real EXP_MOST = 80;
INLINE Vector exp(Vector x) {
    const Real log2e = 1.44269504088896340736f,
               shift = 12582912;  // 1.5·2^23: numbers of this size have no fraction
    Vector shifted = x * log2e + shift, n = shifted - shift, f = x * log2e - n;
    Vector power = f * 0.00015353361959569156f + 0.0013398875016719103f;
    power = power * f + 0.00961843691766262f;
    power = power * f + 0.055503323674201965f;
    power = power * f + 0.24022647738456726f;
    power = power * f + 0.6931471824645996f;
    power = power * f + 1.f;
    return (Vector)((Unsigneds)power + ((Unsigneds)shifted << FRACTION_BITS));  // the lowest bits of `shifted` are n
}
#endif

// Returns 2^(x·by) for |x·by| <= 126, exactly 1 for 0, and exactly 0 for −∞. Its error is 2.3 u and u·|x·by|, less than that of
// the scores for which it is used, products of bfloat16 numbers.
INLINE Vector exp2_of_product(Vector x, Real by) {
    Vector y = x * by;
#if defined(VECTORS_512)
    Vector f = (Vector)_mm512_reduce_ps((__m512)y, _MM_FROUND_TO_NEG_INF);  // y less the integer below, 0 for −∞
    Vector power = f * 0.0018669526325538754f + 0.009017480537295341f;      // relative error 8e-8 for 0 <= f <= 1
    power = power * f + 0.05579951405525208f;
    power = power * f + 0.2401646077632904f;
    power = power * f + 0.6931512951850891f;
    power = power * f + 1.f;
    return (Vector)_mm512_scalef_ps((__m512)power, (__m512)y);
#else
    return exp2(y);
#endif
}

INLINE Vector tanh(Vector x) {
#if defined(REAL)
    for (int n = 0; n < LANES; n++) x[n] = std::tanh(x[n]);
    return x;
#else
    // The series near 0, where (1 - e) / (1 + e) would cancel; otherwise that quotient, with e = exp(-2|x|).
    Vector y = x < 0.f ? -x : x, z = x * x;
    Vector series = z * (-929569.f / 638512875.f) + 21844.f / 6081075.f;
    series = series * z - 1382.f / 155925.f;
    series = series * z + 62.f / 2835.f;
    series = series * z - 17.f / 315.f;
    series = series * z + 2.f / 15.f;
    series = series * z - 1.f / 3.f;
    Vector near_zero = x + x * z * series;
    Vector e = exp2(-2.f * 1.4426950408889634f * y);
    Vector far = (1.f - e) / (1.f + e);
    far = x < 0.f ? -far : far;
    return y < 0.4f ? near_zero : far;
#endif
}

}  // namespace
