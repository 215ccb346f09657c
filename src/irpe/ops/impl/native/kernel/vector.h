// One vector of floats: 16 with AVX-512, 8 with AVX2. All that differs between the two is here.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define IRPE_INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__

constexpr int WIDTH = 16;
constexpr long LANES = 64;  // most queries in a block: a row of a tile
constexpr int ROWS_AT_ONCE[] = {0, 16, 12, 8, 6};  // of a product with 1, 2, ... vectors: registers
using Vector = __m512;
using Integers = __m512i;
#define OPERATION(name) _mm512_##name
#define AS_FLOATS(x) _mm512_castsi512_ps(x)

// a in the lanes whose bit is set, b in the others.
IRPE_INLINE Vector select(int bits, Vector a, Vector b) {
  return _mm512_mask_mov_ps(b, static_cast<__mmask16>(bits), a);
}
// a where x < y, b elsewhere, also where x or y is NaN.
IRPE_INLINE Vector select_less(Vector x, Vector y, Vector a, Vector b) {
  return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), a);
}
// The first n lanes, and 0 in the others.
IRPE_INLINE __mmask16 first(int n) { return static_cast<__mmask16>((1 << n) - 1); }
IRPE_INLINE Vector load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
IRPE_INLINE void store_first(float* p, int n, Vector x) { _mm512_mask_storeu_ps(p, first(n), x); }
// Transposes groups of four lanes: 4 x 4 of them.
IRPE_INLINE void transpose_groups(Vector x[WIDTH]) {
  for (int i = 0; i < 4; ++i) {
    Vector low01 = _mm512_shuffle_f32x4(x[i], x[i + 4], 0x44);
    Vector high01 = _mm512_shuffle_f32x4(x[i], x[i + 4], 0xee);
    Vector low23 = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0x44);
    Vector high23 = _mm512_shuffle_f32x4(x[i + 8], x[i + 12], 0xee);
    x[i] = _mm512_shuffle_f32x4(low01, low23, 0x88);
    x[i + 4] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    x[i + 8] = _mm512_shuffle_f32x4(high01, high23, 0x88);
    x[i + 12] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
  }
}

#else

constexpr int WIDTH = 8;
constexpr long LANES = 72;
constexpr int ROWS_AT_ONCE[] = {0, 8, 6, 4};
using Vector = __m256;
using Integers = __m256i;
#define OPERATION(name) _mm256_##name
#define AS_FLOATS(x) _mm256_castsi256_ps(x)

IRPE_INLINE Vector select(int bits, Vector a, Vector b) {  // a blend looks at the signs alone
  const Integers to_sign = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
  return _mm256_blendv_ps(b, a, AS_FLOATS(_mm256_sllv_epi32(_mm256_set1_epi32(bits), to_sign)));
}
IRPE_INLINE Vector select_less(Vector x, Vector y, Vector a, Vector b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
}
IRPE_INLINE Integers first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
IRPE_INLINE Vector load_first(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
IRPE_INLINE void store_first(float* p, int n, Vector x) { _mm256_maskstore_ps(p, first(n), x); }
IRPE_INLINE void transpose_groups(Vector x[WIDTH]) {  // 2 x 2
  for (int i = 0; i < 4; ++i) {
    Vector a = x[i], b = x[i + 4];
    x[i] = _mm256_permute2f128_ps(a, b, 0x20);
    x[i + 4] = _mm256_permute2f128_ps(a, b, 0x31);
  }
}

#endif

IRPE_INLINE Vector load(const float* p) { return OPERATION(loadu_ps)(p); }
IRPE_INLINE void store(float* p, Vector x) { OPERATION(storeu_ps)(p, x); }
IRPE_INLINE Vector broadcast(float x) { return OPERATION(set1_ps)(x); }
IRPE_INLINE Vector maximum(Vector a, Vector b) { return OPERATION(max_ps)(a, b); }  // b where NaN

// Transposes a square of WIDTH vectors in registers.
IRPE_INLINE void transpose(Vector x[WIDTH]) {
  for (Vector* y = x; y < x + WIDTH; y += 4) {
    Vector low01 = OPERATION(unpacklo_ps)(y[0], y[1]), high01 = OPERATION(unpackhi_ps)(y[0], y[1]);
    Vector low23 = OPERATION(unpacklo_ps)(y[2], y[3]), high23 = OPERATION(unpackhi_ps)(y[2], y[3]);
    y[0] = OPERATION(shuffle_ps)(low01, low23, 0x44),
    y[1] = OPERATION(shuffle_ps)(low01, low23, 0xee);
    y[2] = OPERATION(shuffle_ps)(high01, high23, 0x44),
    y[3] = OPERATION(shuffle_ps)(high01, high23, 0xee);
  }
  transpose_groups(x);
}

// e^x for x <= 0, within 2e-7 of it; exactly 0 below -88, and NaN where x is NaN.
IRPE_INLINE Vector exponential(Vector x) {
  Vector y = maximum(broadcast(-127.0f), x * broadcast(1.44269504f));  // 2^y, y = whole + f
  Integers whole = OPERATION(cvtps_epi32)(y);
  Vector f = y - OPERATION(cvtepi32_ps)(whole);
  Vector p = broadcast(1.326472727e-3f);  // 2^f, the polynomial of least relative error
  p = p * f + broadcast(9.671512768e-3f);
  p = p * f + broadcast(5.550733744e-2f);
  p = p * f + broadcast(2.402224208e-1f);
  p = p * f + broadcast(6.931469776e-1f);
  p = p * f + broadcast(1.0f);
  Integers exponent = OPERATION(add_epi32)(whole, OPERATION(set1_epi32)(127));
  return p * AS_FLOATS(OPERATION(slli_epi32)(exponent, 23));
}

// Rows of floats in memory, and what reads single elements of such rows, or of their transposed.
struct Rows {
  float* data;
  long stride;
};
struct Elements {
  const float* data;
  long row, column;
};
IRPE_INLINE Elements by_row(Rows x) { return {x.data, x.stride, 1}; }
IRPE_INLINE Elements by_column(Rows x) { return {x.data, 1, x.stride}; }
