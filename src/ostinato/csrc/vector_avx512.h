// Sixteen-lane vectors: AVX-512 F, BW, VL, DQ. With OSTINATO_AVX512_BF16 also the dot product of bfloat16 pairs.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(OSTINATO_AVX512_BF16)
#define OSTINATO_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,avx512bf16"
#else
#define OSTINATO_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"
#endif
#define OSTINATO_INLINE static inline __attribute__((always_inline, target(OSTINATO_TARGET)))
#define OSTINATO_KERNEL static __attribute__((target(OSTINATO_TARGET)))

namespace ostinato {
namespace {

struct Vector {
  typedef __m512 Reg;
  static constexpr int kLanes = 16;
  static constexpr int kRows = 8;  // 8 x 2 accumulators of the 32 registers

  OSTINATO_INLINE Reg load(const float* from) { return _mm512_loadu_ps(from); }
  OSTINATO_INLINE void store(float* to, Reg value) { _mm512_storeu_ps(to, value); }
  OSTINATO_INLINE Reg broadcast(float value) { return _mm512_set1_ps(value); }
  OSTINATO_INLINE Reg zero() { return _mm512_setzero_ps(); }
  OSTINATO_INLINE Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  OSTINATO_INLINE Reg subtract(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
  OSTINATO_INLINE Reg multiply(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  OSTINATO_INLINE Reg divide(Reg a, Reg b) { return _mm512_div_ps(a, b); }
  OSTINATO_INLINE Reg multiply_add(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  OSTINATO_INLINE Reg maximum(Reg a, Reg b) { return _mm512_max_ps(a, b); }
  OSTINATO_INLINE Reg minimum(Reg a, Reg b) { return _mm512_min_ps(a, b); }
  OSTINATO_INLINE Reg zero_below(Reg value, Reg x, Reg bound) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), value);
  }
  OSTINATO_INLINE Reg round_nearest(Reg x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  OSTINATO_INLINE Reg scale_by_power(Reg value, Reg exponent) { return _mm512_scalef_ps(value, exponent); }
  OSTINATO_INLINE float reduce_add(Reg x) { return _mm512_reduce_add_ps(x); }
  OSTINATO_INLINE float reduce_max(Reg x) { return _mm512_reduce_max_ps(x); }
  OSTINATO_INLINE Reg load_bf16(const uint16_t* from) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  OSTINATO_INLINE Reg low_half(Reg pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
  }
  OSTINATO_INLINE Reg high_half(Reg pairs) {
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), mask));
  }
  OSTINATO_INLINE void transpose(Reg (&block)[kLanes]) {
    Reg pairs[kLanes];  // 2 x 2 blocks transposed inside each 128-bit lane
    for (int i = 0; i < kLanes; i += 2) {
      pairs[i] = _mm512_unpacklo_ps(block[i], block[i + 1]);
      pairs[i + 1] = _mm512_unpackhi_ps(block[i], block[i + 1]);
    }
    Reg quads[kLanes];  // 4 x 4
    for (int i = 0; i < kLanes; i += 4) {
      quads[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      quads[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
      quads[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      quads[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {  // lane l of quads[4 * g + i] is column 4 * l + i of rows 4 * g .. 4 * g + 3
      const Reg even_low = _mm512_shuffle_f32x4(quads[i], quads[i + 4], 0x88);
      const Reg odd_low = _mm512_shuffle_f32x4(quads[i], quads[i + 4], 0xdd);
      const Reg even_high = _mm512_shuffle_f32x4(quads[i + 8], quads[i + 12], 0x88);
      const Reg odd_high = _mm512_shuffle_f32x4(quads[i + 8], quads[i + 12], 0xdd);
      block[i] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
      block[i + 8] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
      block[i + 4] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
      block[i + 12] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
    }
  }
  // Into the second-level cache: fills of the first level would hold up the loads of the running tile.
  OSTINATO_INLINE void prefetch(const void* address) {
    _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T1);
  }

#if defined(OSTINATO_AVX512_BF16)
  // c + sum over the two bfloat16 halves of a * b
  OSTINATO_INLINE Reg pair_dot(Reg a, Reg b, Reg c) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
  }
  // 32 floats to 32 bfloat16 in order
  OSTINATO_INLINE Reg narrow(Reg low, Reg high) {
    return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  // a0 .. a15 and b0 .. b15  ->  a0 b0 a1 b1 .. a15 b15
  OSTINATO_INLINE Reg interleave(const uint16_t* even, const uint16_t* odd) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
#endif
};

}  // namespace
}  // namespace ostinato
