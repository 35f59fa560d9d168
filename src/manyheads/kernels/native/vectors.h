// Vectors at the width that a file is compiled for, of floats or, in the build for float64, of doubles (REAL):
// the few operations that the kernel needs.
//
// Arithmetic and comparison are the compiler's own vector types, so that one text serves AVX-512, AVX2 and
// whatever else there is; what the language can't say, or compilers say slowly, stands here once for each.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(REAL)
typedef REAL R;
typedef int64_t Whole;
typedef uint64_t Unsigned;
constexpr int BYTES = 16;
#else
typedef float R;
typedef int32_t Whole;
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

constexpr int W = BYTES / sizeof(R);  // numbers in a vector
constexpr int FRACTION = sizeof(R) == 4 ? 23 : 52, LEAST = sizeof(R) == 4 ? -126 : -1022;  // of the format

typedef R V __attribute__((vector_size(BYTES)));
typedef Whole I __attribute__((vector_size(BYTES)));
typedef Unsigned U __attribute__((vector_size(BYTES)));

#define INLINE static inline __attribute__((always_inline))

INLINE V load(const R *x) { V v; memcpy(&v, x, BYTES); return v; }
INLINE void store(R *x, V v) { memcpy(x, &v, BYTES); }
INLINE V all(R x) { return x - V{}; }

// Keeps the compiler from looking through a value in a register.
#if defined(__x86_64__) && !defined(EMULATE_TILES)
#define OPAQUE(v) __asm__ volatile("" : "+v"(v))
#elif defined(__aarch64__) && !defined(EMULATE_TILES)
#define OPAQUE(v) __asm__ volatile("" : "+w"(v))
#else
#define OPAQUE(v) __asm__ volatile("" : "+m"(v))
#endif

// A product as it is rounded: a compiler may otherwise fuse it with the sum that follows, where its rounding is lost.
INLINE V rounded(V product) {
    OPAQUE(product);
    return product;
}

INLINE V max(V a, V b) {  // NaN on either side gives b
#if defined(VECTORS_512)
    return (V)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(VECTORS_256)
    return (V)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

INLINE V shuffle(V a, V b, I from) {  // numbers of both, b's counted on from a's
#if defined(__clang__)
    V v;
    for (int n = 0; n < W; n++) v[n] = from[n] < W ? a[from[n]] : b[from[n] - W];
    return v;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

// Rows become columns: in each stage, blocks of half the size change places.
template <int STEP> INLINE void transpose_stage(V *rows) {
    I low, high;
    for (int n = 0; n < W; n++) {
        low[n] = n & STEP ? n - STEP + W : n;
        high[n] = n & STEP ? n + W : n + STEP;
    }
    for (int i = 0; i < W; i++) {
        if (i & STEP) continue;
        V a = rows[i], b = rows[i + STEP];
        rows[i] = shuffle(a, b, low);
        rows[i + STEP] = shuffle(a, b, high);
    }
}

INLINE void transpose(V *rows) {  // [W, W]
    if constexpr (W > 8) transpose_stage<W / 2>(rows);
    if constexpr (W > 4) transpose_stage<4>(rows);
    if constexpr (W > 2) transpose_stage<2>(rows);
    transpose_stage<1>(rows);
}

// Each row becomes one number of a vector, by a sum or another function of two: in each stage two rows become one.
template <int STEP, class F> INLINE void fold_stage(V *rows, F both) {
    I low, high;
    for (int n = 0; n < W; n++) {
        low[n] = n & STEP ? n - STEP + W : n;
        high[n] = n & STEP ? n + W : n + STEP;
    }
    for (int i = 0; i < STEP; i++)
        rows[i] = both(shuffle(rows[i], rows[i + STEP], low), shuffle(rows[i], rows[i + STEP], high));
}

template <class F> INLINE V fold(V *rows, F both) {  // [W, W] → [W]; the rows are used up
    if constexpr (W > 8) fold_stage<W / 2>(rows, both);
    if constexpr (W > 4) fold_stage<4>(rows, both);
    if constexpr (W > 2) fold_stage<2>(rows, both);
    fold_stage<1>(rows, both);
    return rows[0];
}

INLINE V sums(V *rows) { return fold(rows, [](V a, V b) { return a + b; }); }
INLINE V maxima(V *rows) { return fold(rows, [](V a, V b) { return max(a, b); }); }

// All numbers of a vector become one, by a sum or another function of two.
template <int STEP, class F> INLINE R reduce(V v, F both) {
    I from;
    for (int n = 0; n < W; n++) from[n] = n ^ STEP;
    v = both(v, shuffle(v, v, from));
    if constexpr (STEP > 1) return reduce<STEP / 2>(v, both);
    return v[0];
}

INLINE R highest(V v) { return reduce<W / 2>(v, [](V a, V b) { return max(a, b); }); }
INLINE R sum(V v) { return reduce<W / 2>(v, [](V a, V b) { return a + b; }); }

INLINE uint32_t lanes(I where) {  // a bit for each number of a comparison
#if defined(VECTORS_512)
    return _mm512_movepi32_mask((__m512i)where);
#elif defined(VECTORS_256)
    return _mm256_movemask_ps((__m256)where);
#else
    uint32_t bits = 0;
    for (int n = 0; n < W; n++) bits |= (uint32_t)(where[n] != 0) << n;
    return bits;
#endif
}

INLINE uint32_t reaching(V x, R bar) {  // a bit for each number that isn't less
#if defined(VECTORS_512)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(bar), _CMP_GE_OQ);
#else
    return lanes(x >= bar);
#endif
}

INLINE V nearest(V x) {  // to a whole number of few digits
#if defined(VECTORS_512)
    return (V)_mm512_roundscale_ps((__m512)x, 0);
#elif defined(VECTORS_256)
    return (V)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const R shift = (R)1.5 * ((Whole)1 << FRACTION);  // beside it there is no room for a fraction
    V y = x + shift;
    __asm__("" : "+m"(y));  // what the compiler doesn't see it doesn't simplify
    return y - shift;
#endif
}

// 2^f for |f| <= 1/2, exactly 1 at 0: a polynomial of the least relative error (9e-8), or the series (4e-18).
INLINE V fraction(V f) {
#if defined(REAL)
    V p = {};
    R factor[14] = {1};
    for (int n = 1; n < 14; n++) factor[n] = factor[n - 1] * (R)0.69314718055994530942 / n;
    for (int n = 13; n >= 0; n--) p = p * f + factor[n];
    return p;
#else
    V p = f * 0.001326472731307149f + 0.009671512991189957f;
    p = p * f + 0.05550733581185341f;
    p = p * f + 0.24022242426872253f;
    p = p * f + 0.6931470036506653f;
    return p * f + 1.f;
#endif
}

// 2^x for x <= 0. Below what the format holds with all its digits it is exactly 0, of NaN it is NaN.
INLINE V exp2(V x) {
    V n = nearest(x), p = fraction(x - n);
#if defined(VECTORS_512)
    __mmask16 some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(LEAST), _CMP_NLT_UQ);
    return (V)_mm512_maskz_scalef_ps(some, (__m512)p, (__m512)n);
#else
    U exponent = (U)__builtin_convertvector(n, I) << FRACTION;  // of lanes that are taken it is right
    return x < (R)LEAST ? V{} : (V)((U)p + exponent);
#endif
}

// Is a product subtracted from before it is rounded? `exp` needs it.
#if !defined(REAL) && (defined(__FMA__) || defined(__aarch64__))
#define HAS_EXP

// e^x for |x| <= EXP_MOST, to 1.4 u and 0.22 u·|x|: its largest error is that of log2(e) in float. So a row's
// log-sum-exp is right without the maximum being subtracted first. 2^f is a polynomial of relative error 2e-9.
constexpr R EXP_MOST = 80;
INLINE V exp(V x) {
    const R log2e = 1.44269504088896340736f, shift = 12582912;  // 1.5·2^23: beside it there is no room for a fraction
    V shifted = x * log2e + shift, n = shifted - shift, f = x * log2e - n;
    V p = f * 0.00015353361959569156f + 0.0013398875016719103f;
    p = p * f + 0.00961843691766262f;
    p = p * f + 0.055503323674201965f;
    p = p * f + 0.24022647738456726f;
    p = p * f + 0.6931471824645996f;
    p = p * f + 1.f;
    return (V)((U)p + ((U)shifted << FRACTION));  // the lowest bits of `shifted` are n
}
#endif

INLINE V tanh(V x) {
#if defined(REAL)
    for (int n = 0; n < W; n++) x[n] = std::tanh(x[n]);
    return x;
#else
    // The series near 0, where (1 - e) / (1 + e) would cancel, and that beyond, with e = e^-2|x|.
    V y = x < 0.f ? -x : x, z = x * x;
    V p = z * (-929569.f / 638512875.f) + 21844.f / 6081075.f;
    p = p * z - 1382.f / 155925.f;
    p = p * z + 62.f / 2835.f;
    p = p * z - 17.f / 315.f;
    p = p * z + 2.f / 15.f;
    p = p * z - 1.f / 3.f;
    V near = x + x * z * p;
    V e = exp2(-2.f * 1.4426950408889634f * y);
    V far = (1.f - e) / (1.f + e);
    far = x < 0.f ? -far : far;
    return y < 0.4f ? near : far;
#endif
}

}  // namespace
