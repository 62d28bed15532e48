// Matrix products whose rows do not depend on each other: what the operators and the kernels share. Plain C++.
//
// Invariance: out[r][c] is one sum over k from left to right, in one accumulator, whatever the number of rows, threads
// or panels. A register tile of 12 rows does the same operations for each of its rows as a tile of one.
//
// Weights are read as *panels* of 32 output columns. A word is one float, or a pair of bfloat16 (inputs 2w, 2w + 1):
//
//   packed [panels][words][32 columns]      one panel is one linear run of memory
#pragma once

#include <cstdint>

#include "kernels.h"

namespace ostinato {

constexpr int64_t kPanelColumns = 32;

// Rows that are gathered at once; a multiple of every kernel's register tile (12, 4).
constexpr int64_t kGatherRows = 96;

// One weight: `columns` outputs, each over `depth` inputs.
struct WeightView {
  const void* data;
  int64_t columns;
  int64_t depth;
  bool packed;            // in panels; else plain, with strides in elements, and packed panel by panel during the call
  int64_t column_stride;
  int64_t depth_stride;
};

// Up to kGatherRows rows times the panels [panel_begin, panel_end) of one weight.
struct RowsTask {
  const void* rows;       // [.., depth], the last dimension contiguous
  int64_t row_stride;     // elements
  const int32_t* index;   // row i of the task is rows[index[first + i]]; null: rows[first + i]
  int64_t first;
  int64_t count;
  WeightView weight;
  const void* bias;       // [columns] in the dtype of the rows, or null
  void* out;              // row i of the task goes to out[first + i]
  int64_t out_stride;     // elements
  bool out_float;         // float32 whatever the dtype of the rows
  int64_t panel_begin;
  int64_t panel_end;
};

// out[token] = sum over j from left to right of weights[token][j] * rows[slots[token][j]]; slots below 0 are left out.
struct CombineTask {
  const float* rows;      // [.., columns]
  const int32_t* slots;   // [tokens, choices]
  const float* weights;   // [tokens, choices]
  void* out;              // [tokens, columns]
  int64_t choices;
  int64_t columns;
  int64_t token_begin;
  int64_t token_end;
};

// The entry points of one instruction set; the index is 0 for float32 and 1 for bfloat16.
struct GemmTable {
  // scratch: gemm_scratch_floats() floats, 64-byte aligned, private to the calling thread.
  void (*multiply[2])(const RowsTask&, float* scratch);
  void (*pack_panel[2])(const WeightView&, int64_t panel, float* to);
  void (*combine[2])(const CombineTask&, float* scratch);
};

inline int64_t panel_count(int64_t columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }

// Words of one column of a panel, for items of `item_bytes`.
inline int64_t panel_words(int64_t depth, int64_t item_bytes) { return item_bytes == 4 ? depth : (depth + 1) / 2; }

// | gathered rows [kGatherRows][depth, made even] | one panel [depth][32] | sums [kGatherRows][32] |
inline int64_t gathered_floats(int64_t depth) { return kGatherRows * (depth + 1); }
inline int64_t gemm_scratch_floats(int64_t depth) {
  return gathered_floats(depth) + (depth + kGatherRows) * kPanelColumns;
}

const GemmTable* portable_gemm();
const GemmTable* avx2_gemm();         // null when this is not an x86-64 build
const GemmTable* avx512_gemm();       // idem
const GemmTable* avx512_bf16_gemm();  // idem

}  // namespace ostinato
