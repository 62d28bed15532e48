// Eight-lane vectors: AVX2 with fused multiply-add.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define OSTINATO_TARGET "avx2,fma"
#define OSTINATO_INLINE static inline __attribute__((always_inline, target(OSTINATO_TARGET)))
#define OSTINATO_KERNEL static __attribute__((target(OSTINATO_TARGET)))

namespace ostinato {
namespace {

struct Vector {
  typedef __m256 Reg;
  static constexpr int kLanes = 8;
  static constexpr int kRows = 4;  // 4 x 2 accumulators of the 16 registers

  OSTINATO_INLINE Reg load(const float* from) { return _mm256_loadu_ps(from); }
  OSTINATO_INLINE void store(float* to, Reg value) { _mm256_storeu_ps(to, value); }
  OSTINATO_INLINE Reg broadcast(float value) { return _mm256_set1_ps(value); }
  OSTINATO_INLINE Reg zero() { return _mm256_setzero_ps(); }
  OSTINATO_INLINE Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
  OSTINATO_INLINE Reg subtract(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
  OSTINATO_INLINE Reg multiply(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  OSTINATO_INLINE Reg divide(Reg a, Reg b) { return _mm256_div_ps(a, b); }
  OSTINATO_INLINE Reg multiply_add(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  OSTINATO_INLINE Reg maximum(Reg a, Reg b) { return _mm256_max_ps(a, b); }
  OSTINATO_INLINE Reg minimum(Reg a, Reg b) { return _mm256_min_ps(a, b); }
  OSTINATO_INLINE Reg zero_below(Reg value, Reg x, Reg bound) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, bound, _CMP_LT_OQ), value);
  }
  OSTINATO_INLINE Reg round_nearest(Reg x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  OSTINATO_INLINE Reg scale_by_power(Reg value, Reg exponent) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
    return _mm256_mul_ps(value, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
  }
  OSTINATO_INLINE float reduce_add(Reg x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    half = _mm_add_ss(half, _mm_movehdup_ps(half));
    return _mm_cvtss_f32(half);
  }
  OSTINATO_INLINE float reduce_max(Reg x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    half = _mm_max_ss(half, _mm_movehdup_ps(half));
    return _mm_cvtss_f32(half);
  }
  OSTINATO_INLINE Reg load_bf16(const uint16_t* from) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  OSTINATO_INLINE Reg low_half(Reg pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
  }
  OSTINATO_INLINE Reg high_half(Reg pairs) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), mask));
  }
  OSTINATO_INLINE void transpose(Reg (&block)[kLanes]) {
    Reg pairs[kLanes];  // 2 x 2 blocks transposed inside each 128-bit lane
    for (int i = 0; i < kLanes; i += 2) {
      pairs[i] = _mm256_unpacklo_ps(block[i], block[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_ps(block[i], block[i + 1]);
    }
    Reg quads[kLanes];  // 4 x 4
    for (int i = 0; i < kLanes; i += 4) {
      quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
      quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      block[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
      block[i + 4] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
    }
  }
  // Into the second-level cache: fills of the first level would hold up the loads of the running tile.
  OSTINATO_INLINE void prefetch(const void* address) {
    _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T1);
  }
};

}  // namespace
}  // namespace ostinato
