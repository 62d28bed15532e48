// Rows of numbers in and out of float memory, and the functions that scans apply to them. Included by a kernel file
// after its vector header.
#pragma once

#include "formats.h"
#include "scan_kernels.h"

namespace ostinato {
namespace {

// e^x; exactly 1 at 0, 0 below -87.33, and above 88.37 what it is there. Relative error below 3e-7. Keeps NaN.
OSTINATO_INLINE Vector::Reg exp_of(Vector::Reg x) {
  const Vector::Reg lowest = Vector::broadcast(-87.33f);
  const Vector::Reg bounded = Vector::minimum(Vector::broadcast(88.37f), Vector::maximum(lowest, x));
  const Vector::Reg whole = Vector::round_nearest(Vector::multiply(bounded, Vector::broadcast(1.4426950408889634f)));
  // ln 2 in two parts, the first of few bits, so that the product with `whole` is exact
  Vector::Reg rest = Vector::multiply_add(whole, Vector::broadcast(-0.693359375f), bounded);
  rest = Vector::multiply_add(whole, Vector::broadcast(2.12194440e-4f), rest);
  Vector::Reg sum = Vector::broadcast(1.9841270e-4f);
  sum = Vector::multiply_add(sum, rest, Vector::broadcast(1.3888889e-3f));
  sum = Vector::multiply_add(sum, rest, Vector::broadcast(8.3333333e-3f));
  sum = Vector::multiply_add(sum, rest, Vector::broadcast(4.1666667e-2f));
  sum = Vector::multiply_add(sum, rest, Vector::broadcast(1.6666667e-1f));
  sum = Vector::multiply_add(sum, rest, Vector::broadcast(0.5f));
  sum = Vector::multiply_add(sum, rest, Vector::broadcast(1.0f));
  sum = Vector::multiply_add(sum, rest, Vector::broadcast(1.0f));
  return Vector::zero_below(Vector::scale_by_power(sum, whole), x, lowest);
}

// log(1 + e^x) = max(x, 0) + log(1 + e), e = e^-|x|; log(1 + e) = 2 atanh(s), s = e / (2 + e) <= 1/3, whose series
// keeps the relative error small down to the smallest e.
OSTINATO_INLINE Vector::Reg softplus_of(Vector::Reg x) {
  const Vector::Reg zero = Vector::zero();
  const Vector::Reg power = exp_of(Vector::minimum(x, Vector::subtract(zero, x)));
  const Vector::Reg s = Vector::divide(power, Vector::add(Vector::broadcast(2.0f), power));
  const Vector::Reg square = Vector::multiply(s, s);
  Vector::Reg sum = Vector::broadcast(1.0f / 15.0f);
  sum = Vector::multiply_add(sum, square, Vector::broadcast(1.0f / 13.0f));
  sum = Vector::multiply_add(sum, square, Vector::broadcast(1.0f / 11.0f));
  sum = Vector::multiply_add(sum, square, Vector::broadcast(1.0f / 9.0f));
  sum = Vector::multiply_add(sum, square, Vector::broadcast(1.0f / 7.0f));
  sum = Vector::multiply_add(sum, square, Vector::broadcast(1.0f / 5.0f));
  sum = Vector::multiply_add(sum, square, Vector::broadcast(1.0f / 3.0f));
  sum = Vector::multiply_add(sum, square, Vector::broadcast(1.0f));
  return Vector::multiply_add(Vector::add(s, s), sum, Vector::maximum(zero, x));
}

OSTINATO_INLINE Vector::Reg silu_of(Vector::Reg x) {
  const Vector::Reg power = exp_of(Vector::subtract(Vector::zero(), x));
  return Vector::divide(x, Vector::add(Vector::broadcast(1.0f), power));
}

template <class Source>
OSTINATO_INLINE void widen_row(const Source* from, int64_t count, int64_t padded_count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Vector::store(to + i, load_source(from + i));
  }
  for (; i < count; ++i) {
    to[i] = widen(from[i]);
  }
  for (; i < padded_count; ++i) {
    to[i] = 0.0f;
  }
}

// `count` contiguous numbers from element `offset` on, filled up with zeros to `padded_count`.
OSTINATO_KERNEL void load_row(const RowView& view, int64_t offset, int64_t count, int64_t padded_count, float* to) {
  if (view.dtype == 0) {
    widen_row(static_cast<const float*>(view.data) + offset, count, padded_count, to);
  } else {
    widen_row(static_cast<const uint16_t*>(view.data) + offset, count, padded_count, to);
  }
}

OSTINATO_INLINE float load_one(const RowView& view, int64_t offset) {
  return view.dtype == 0 ? static_cast<const float*>(view.data)[offset]
                         : widen(static_cast<const uint16_t*>(view.data)[offset]);
}

// One number per row of a block, filled up with zeros to kScanRows.
OSTINATO_INLINE void load_column(const RowView& view, const ScanBlock& block, int64_t inner, float* to) {
  for (int64_t r = 0; r < kScanRows; ++r) {
    to[r] = r < block.rows ? load_one(view, (block.first + r) * view.row + inner * view.inner) : 0.0f;
  }
}

// A parameter's numbers [first, first + count), or zeros where it was not given.
OSTINATO_INLINE void load_parameter(const RowView& view, int64_t first, int64_t count, int64_t padded_count, float* to) {
  for (int64_t i = 0; i < padded_count; ++i) {
    to[i] = i < count && view.data != nullptr ? load_one(view, (first + i) * view.row) : 0.0f;
  }
}

OSTINATO_KERNEL void store_row(const float* from, int64_t count, const OutView& out, int64_t offset) {
  if (out.dtype == 0) {
    std::memcpy(static_cast<float*>(out.data) + offset, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(out.data) + offset;
  for (int64_t i = 0; i < count; ++i) {
    narrow_to(from[i], to + i);
  }
}

// Cuts regions off the memory of a task; all sizes are multiples of kScanPad, so every region is aligned.
struct ScanMemory {
  float* next;
};

OSTINATO_INLINE float* cut(ScanMemory* memory, int64_t floats) {
  float* region = memory->next;
  memory->next += floats;
  return region;
}

}  // namespace
}  // namespace ostinato
