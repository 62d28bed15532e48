// Four-lane vectors through the compiler's vector extension: lowers to SSE2, NEON or scalar code.
// Multiply and add stay separate except where the baseline of the architecture has a fused form (AArch64); the build
// turns off contraction, so that one source expression always rounds the same way.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define OSTINATO_INLINE static inline __attribute__((always_inline))
#define OSTINATO_KERNEL static

namespace ostinato {
namespace {

struct Vector {
  typedef float Reg __attribute__((vector_size(16)));
  typedef int32_t Bits __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kRows = 4;  // rows of a register tile: 4 x 2 accumulators

  OSTINATO_INLINE Reg load(const float* from) {
    Reg value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  OSTINATO_INLINE void store(float* to, Reg value) { std::memcpy(to, &value, sizeof(value)); }
  OSTINATO_INLINE Reg broadcast(float value) { return Reg{value, value, value, value}; }
  OSTINATO_INLINE Reg zero() { return Reg{0.0f, 0.0f, 0.0f, 0.0f}; }
  OSTINATO_INLINE Reg add(Reg a, Reg b) { return a + b; }
  OSTINATO_INLINE Reg subtract(Reg a, Reg b) { return a - b; }
  OSTINATO_INLINE Reg multiply(Reg a, Reg b) { return a * b; }
  OSTINATO_INLINE Reg divide(Reg a, Reg b) { return a / b; }
  OSTINATO_INLINE Reg multiply_add(Reg a, Reg b, Reg c) {
#if defined(__aarch64__)
    return (Reg)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
  }
  // Picks b where either is not a number, as the x86 instruction does.
  OSTINATO_INLINE Reg maximum(Reg a, Reg b) { return select(a > b, a, b); }
  OSTINATO_INLINE Reg minimum(Reg a, Reg b) { return select(a < b, a, b); }
  OSTINATO_INLINE Reg zero_below(Reg value, Reg x, Reg bound) { return select(x < bound, zero(), value); }
  OSTINATO_INLINE Reg round_nearest(Reg x) {
    const Reg magic = broadcast(12582912.0f);  // 1.5 * 2^23: |x| < 2^22 loses its fraction
    return (x + magic) - magic;
  }
  // value * 2^exponent, exponent an integer in [-126, 127]
  OSTINATO_INLINE Reg scale_by_power(Reg value, Reg exponent) {
    Bits power;
    for (int lane = 0; lane < kLanes; ++lane) {
      power[lane] = static_cast<int32_t>(static_cast<uint32_t>(static_cast<int32_t>(exponent[lane]) + 127) << 23);
    }
    return value * (Reg)power;
  }
  OSTINATO_INLINE float reduce_add(Reg x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  OSTINATO_INLINE float reduce_max(Reg x) {
    const float even = x[0] > x[2] ? x[0] : x[2];
    const float odd = x[1] > x[3] ? x[1] : x[3];
    return even > odd ? even : odd;
  }
  OSTINATO_INLINE Reg load_bf16(const uint16_t* from) {
    const Bits bits = {from[0], from[1], from[2], from[3]};
    return (Reg)(bits << 16);
  }
  // The two bfloat16 halves of each 32-bit lane, widened.
  OSTINATO_INLINE Reg low_half(Reg pairs) { return (Reg)((Bits)pairs << 16); }
  OSTINATO_INLINE Reg high_half(Reg pairs) {
    const int32_t mask = static_cast<int32_t>(0xffff0000u);
    return (Reg)((Bits)pairs & Bits{mask, mask, mask, mask});
  }
  OSTINATO_INLINE void transpose(Reg (&block)[kLanes]) {
    for (int row = 0; row < kLanes; ++row) {
      for (int column = row + 1; column < kLanes; ++column) {
        const float kept = block[row][column];
        block[row][column] = block[column][row];
        block[column][row] = kept;
      }
    }
  }
  OSTINATO_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

 private:
  OSTINATO_INLINE Reg select(Bits mask, Reg yes, Reg no) { return (Reg)((mask & (Bits)yes) | (~mask & (Bits)no)); }
};

}  // namespace
}  // namespace ostinato
