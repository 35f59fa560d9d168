// Vectors of floats at the width that a file is compiled for: the few operations that the kernel needs.
//
// Arithmetic and comparison are the compiler's own vector types, so that one text serves AVX-512, AVX2 and
// whatever else there is; what the language can't say, or compilers say slowly, stands here once for each.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, BYTES = 64;  // floats in a vector
#elif defined(__AVX2__)
constexpr int W = 8, BYTES = 32;
#else
constexpr int W = 4, BYTES = 16;
#endif

typedef float V __attribute__((vector_size(BYTES)));
typedef int32_t I __attribute__((vector_size(BYTES)));

#define INLINE static inline __attribute__((always_inline))

INLINE V load(const float *x) { V v; memcpy(&v, x, BYTES); return v; }
INLINE void store(float *x, V v) { memcpy(x, &v, BYTES); }
INLINE V all(float x) { return x - V{}; }
INLINE V abs(V x) { return (V)((I)x & 0x7fffffff); }

INLINE V max(V a, V b) {  // NaN on either side gives b
#if defined(__AVX512F__)
    return (V)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (V)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

INLINE float highest(V v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float x = v[0];
    for (int n = 1; n < W; n++) x = v[n] > x ? v[n] : x;
    return x;
#endif
}

INLINE float sum(V v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float x = v[0];
    for (int n = 1; n < W; n++) x += v[n];
    return x;
#endif
}

INLINE V nearest(V x) {  // to a whole number, |x| < 2^22
#if defined(__AVX512F__)
    return (V)_mm512_roundscale_ps((__m512)x, 0);
#elif defined(__AVX2__)
    return (V)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const float shift = 12582912.f;  // 1.5 * 2^23: beside it there is no room for a fraction
    V y = x + shift;
    __asm__("" : "+m"(y));  // what the compiler doesn't see it doesn't simplify
    return y - shift;
#endif
}

// 2^x for x <= 0: 2^n * 2^f with n whole and |f| <= 1/2, 2^f by a polynomial fitted for the least relative
// error (9e-8), exactly 1 at 0. Below 2^-126 it is exactly 0, of NaN it is NaN.
INLINE V exp2(V x) {
    V n = nearest(x), f = x - n;
    V p = f * 0.001326472731307149f + 0.009671512991189957f;
    p = p * f + 0.05550733581185341f;
    p = p * f + 0.24022242426872253f;
    p = p * f + 0.6931470036506653f;
    p = p * f + 1.f;
#if defined(__AVX512F__)
    __mmask16 some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.f), _CMP_NLT_UQ);
    return (V)_mm512_maskz_scalef_ps(some, (__m512)p, (__m512)n);
#else
    I exponent = __builtin_convertvector(n, I) << 23;
    return x < -126.f ? V{} : (V)((I)p + exponent);
#endif
}

// tanh by its series near 0, where 1 - 2 / (e^2x + 1) would cancel, and by that beyond.
INLINE V tanh(V x) {
    V y = abs(x), z = x * x;
    V p = z * (-929569.f / 638512875.f) + 21844.f / 6081075.f;
    p = p * z - 1382.f / 155925.f;
    p = p * z + 62.f / 2835.f;
    p = p * z - 17.f / 315.f;
    p = p * z + 2.f / 15.f;
    p = p * z - 1.f / 3.f;
    V near = x + x * z * p;
    V e = exp2(-2.f * 1.4426950408889634f * y);  // e^-2|x|
    V far = (1.f - e) / (1.f + e);
    far = x < 0.f ? -far : far;
    return y < 0.4f ? near : far;
}

}  // namespace
