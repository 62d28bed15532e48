// Per-head products of rows with small matrices: what the operator and its kernels share. Plain C++, no torch headers.
#pragma once

#include <cstdint>

namespace ostinato {

// Columns of a packed panel: a whole number of two vectors of every instruction set, so that one packing serves all.
constexpr int64_t kPanelColumns = 32;

// Rows of one head that a task computes; they share the head's matrix while it is in the cache.
constexpr int64_t kAbsorbRows = 64;

// out[row][head] = x[row][head] . w[head], in elements of one dtype; strides in elements.
//
//   w  [heads][panels][steps][kPanelColumns]    float32: a step is one row of the matrix
//                                               bfloat16: two rows, interleaved by column: (0,0) (1,0) (0,1) (1,1) ...
// A panel is read from front to back, once for each register tile of rows; the last one is filled up with zeros.
struct AbsorbProblem {
  const void* x;
  int64_t x_row_stride;
  int64_t x_head_stride;
  const void* w;
  void* out;
  int64_t out_row_stride;
  int64_t out_head_stride;
  int64_t inner;    // length of a row of x
  int64_t columns;  // length of a row of out
  int64_t panels;
};

// Rows [first_row, first_row + rows) of one head. scratch: absorb_scratch_floats() floats, 64-byte aligned.
struct AbsorbTask {
  int64_t head;
  int64_t first_row;
  int64_t rows;
  float* scratch;
};

inline int64_t absorb_scratch_floats(int64_t inner) { return kAbsorbRows * (inner + 1); }

typedef void (*AbsorbKernel)(const AbsorbProblem&, const AbsorbTask&);

// Index 0 is for float32, 1 for bfloat16. All but the portable one are null when this is not an x86-64 build.
struct AbsorbKernels {
  AbsorbKernel run[2];
};

AbsorbKernels portable_absorb();
AbsorbKernels avx2_absorb();
AbsorbKernels avx512_absorb();
AbsorbKernels avx512_bf16_absorb();

}  // namespace ostinato
