// Index of the largest value of a row. Included by a kernel file after its vector header and formats.h.
#pragma once

#include "formats.h"

namespace ostinato {
namespace {

// The first of equal maxima; NaN counts as minus infinity, and a row without any number gives 0.
// One pass of vector maxima over pieces that stay in the first-level cache, then a look into the winning piece alone.
template <class Source>
OSTINATO_KERNEL int64_t argmax(const void* row, int64_t columns) {
  constexpr int64_t kPiece = 4096;
  const Source* values = static_cast<const Source*>(row);
  float best = -__builtin_huge_valf();
  int64_t best_begin = 0;
  for (int64_t begin = 0; begin < columns; begin += kPiece) {
    const int64_t end = begin + kPiece < columns ? begin + kPiece : columns;
    Vector::Reg tops[4];
    for (Vector::Reg& top : tops) {
      top = Vector::broadcast(-__builtin_huge_valf());
    }
    int64_t column = begin;
    for (; column + 4 * kLanes <= end; column += 4 * kLanes) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        tops[i] = Vector::maximum(load_source(values + column + i * kLanes), tops[i]);  // NaN loses
      }
    }
    float top = Vector::reduce_max(Vector::maximum(Vector::maximum(tops[0], tops[1]),
                                                   Vector::maximum(tops[2], tops[3])));
    for (; column < end; ++column) {
      const float value = widen(values[column]);
      top = value > top ? value : top;
    }
    if (top > best) {
      best = top;
      best_begin = begin;
    }
  }
  for (int64_t column = best_begin; column < columns; ++column) {
    if (widen(values[column]) == best) {
      return best == -__builtin_huge_valf() ? 0 : column;
    }
  }
  return 0;
}

}  // namespace
}  // namespace ostinato
