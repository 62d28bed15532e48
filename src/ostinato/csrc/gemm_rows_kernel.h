// The row-wise matrix product, written once over Vector and an operand format. Included after a vector header.
#pragma once

#include "formats.h"
#include "gemm_rows.h"

namespace ostinato {
namespace {

// The register tile: rows x 2 vectors, plus what the operands need.
constexpr int kTileRows = Vector::kLanes == 16 ? 12 : 4;
constexpr int64_t kPieceWords = 256;  // 32 KiB of a panel
static_assert(kGatherRows % kTileRows == 0, "a gathered block is a whole number of tiles");

struct FloatOperand {
  typedef float Source;
  static constexpr int kInputs = 1;  // words of a gathered row per word of a panel
  OSTINATO_INLINE int64_t gathered(int64_t depth) { return depth; }
  OSTINATO_INLINE float take(const float* row, int64_t, int64_t word) { return row[word]; }
};

// bfloat16 without a bfloat16 unit: rows are widened when they are gathered, weights when they are used.
struct WidenedOperand {
  typedef uint16_t Source;
  static constexpr int kInputs = 2;
  OSTINATO_INLINE int64_t gathered(int64_t depth) { return (depth + 1) / 2 * 2; }
  OSTINATO_INLINE float take(const uint16_t* row, int64_t depth, int64_t word) {
    return word < depth ? widen(row[word]) : 0.0f;
  }
};

#if defined(OSTINATO_AVX512_BF16)
struct PairOperand {
  typedef uint16_t Source;
  static constexpr int kInputs = 1;
  OSTINATO_INLINE int64_t gathered(int64_t depth) { return (depth + 1) / 2; }
  OSTINATO_INLINE float take(const uint16_t* row, int64_t depth, int64_t word) {
    float pair = 0.0f;
    if (2 * word + 1 < depth) {
      std::memcpy(&pair, row + 2 * word, 4);
    } else {
      std::memcpy(&pair, row + 2 * word, 2);
    }
    return pair;
  }
};
#endif

// Rows interleaved, so that one word of every row of a tile lies together: [tiles][words][rows of the tile].
template <class Operand>
OSTINATO_KERNEL void gather_rows(const RowsTask& task, float* gathered) {
  typedef typename Operand::Source Source;
  const int64_t depth = task.weight.depth;
  const int64_t words = Operand::gathered(depth);
  for (int64_t tile = 0; tile < task.count; tile += kTileRows) {
    const int64_t rows = task.count - tile < kTileRows ? task.count - tile : kTileRows;
    float* to = gathered + tile * words;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = task.first + tile + r;
      const int64_t from = task.index == nullptr ? row : task.index[row];
      const Source* source = static_cast<const Source*>(task.rows) + from * task.row_stride;
      for (int64_t word = 0; word < words; ++word) {
        to[word * rows + r] = Operand::take(source, depth, word);
      }
    }
  }
}

// One word of a panel (two vectors) times one word of each row.
template <class Operand, int Rows>
OSTINATO_INLINE void multiply_word(const float* inputs, const float* panel, Vector::Reg (&left)[Rows],
                                   Vector::Reg (&right)[Rows]) {
  const Vector::Reg words_left = Vector::load(panel);
  const Vector::Reg words_right = Vector::load(panel + kLanes);
  if constexpr (Operand::kInputs == 2) {
    const Vector::Reg low_left = Vector::low_half(words_left);
    const Vector::Reg low_right = Vector::low_half(words_right);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vector::Reg input = Vector::broadcast(inputs[r]);
      left[r] = Vector::multiply_add(input, low_left, left[r]);
      right[r] = Vector::multiply_add(input, low_right, right[r]);
    }
    const Vector::Reg high_left = Vector::high_half(words_left);
    const Vector::Reg high_right = Vector::high_half(words_right);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vector::Reg input = Vector::broadcast(inputs[Rows + r]);
      left[r] = Vector::multiply_add(input, high_left, left[r]);
      right[r] = Vector::multiply_add(input, high_right, right[r]);
    }
    return;
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    const Vector::Reg input = Vector::broadcast(inputs[r]);
#if defined(OSTINATO_AVX512_BF16)
    if constexpr (sizeof(typename Operand::Source) == 2) {
      left[r] = Vector::pair_dot(input, words_left, left[r]);
      right[r] = Vector::pair_dot(input, words_right, right[r]);
      continue;
    }
#endif
    left[r] = Vector::multiply_add(input, words_left, left[r]);
    right[r] = Vector::multiply_add(input, words_right, right[r]);
  }
}

// to[r][32] = (fresh ? 0 : to[r][32]) + the products of `words` words, one after another
template <class Operand, int Rows>
OSTINATO_KERNEL void multiply_tile(const float* inputs, const float* panel, int64_t words, bool fresh, float* to) {
  for (int64_t column = 0; column < kPanelColumns; column += 2 * kLanes) {
    Vector::Reg left[Rows];
    Vector::Reg right[Rows];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      left[r] = fresh ? Vector::zero() : Vector::load(to + r * kPanelColumns + column);
      right[r] = fresh ? Vector::zero() : Vector::load(to + r * kPanelColumns + column + kLanes);
    }
    const float* input = inputs;
    const float* weight = panel + column;
    for (int64_t word = 0; word < words; ++word) {
      multiply_word<Operand, Rows>(input, weight, left, right);
      input += Rows * Operand::kInputs;
      weight += kPanelColumns;
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      Vector::store(to + r * kPanelColumns + column, left[r]);
      Vector::store(to + r * kPanelColumns + column + kLanes, right[r]);
    }
  }
}

template <class Operand, int Rows>
OSTINATO_INLINE void multiply_rows(int64_t rows, const float* inputs, const float* panel, int64_t words, bool fresh,
                                   float* to) {
  if (rows == Rows) {
    multiply_tile<Operand, Rows>(inputs, panel, words, fresh, to);
  } else if constexpr (Rows > 1) {
    multiply_rows<Operand, Rows - 1>(rows, inputs, panel, words, fresh, to);
  }
}

// A panel is taken in pieces that stay in the first-level cache while all tiles pass over them; the sums wait in memory
// between two pieces, as floats, so the cut does not show in them.
template <class Operand>
OSTINATO_INLINE void multiply_panel(int64_t count, const float* gathered, const float* panel, int64_t words,
                                    float* sums) {
  const int64_t row_words = words * Operand::kInputs;
  for (int64_t word = 0; word < words; word += kPieceWords) {
    const int64_t piece = words - word < kPieceWords ? words - word : kPieceWords;
    for (int64_t tile = 0; tile < count; tile += kTileRows) {
      const int64_t rows = count - tile < kTileRows ? count - tile : kTileRows;
      const float* inputs = gathered + tile * row_words + word * Operand::kInputs * rows;
      multiply_rows<Operand, kTileRows>(rows, inputs, panel + word * kPanelColumns, piece, word == 0,
                                        sums + tile * kPanelColumns);
    }
  }
}

// Columns beyond the weight's are zero.
template <class Source>
OSTINATO_KERNEL void pack_panel(const WeightView& weight, int64_t panel, float* to) {
  constexpr int64_t kItem = static_cast<int64_t>(sizeof(Source));
  constexpr int64_t kPerWord = 4 / kItem;
  const int64_t words = panel_words(weight.depth, kItem);
  const int64_t first = panel * kPanelColumns;
  const int64_t columns = weight.columns - first < kPanelColumns ? weight.columns - first : kPanelColumns;
  const Source* data = static_cast<const Source*>(weight.data) + first * weight.column_stride;
  if (weight.depth_stride == 1) {
    const int64_t bytes = weight.depth * kItem;
    for (int64_t word = 0; word < words; word += kLanes) {
      const int64_t used = words - word < kLanes ? words - word : kLanes;
      for (int64_t column = 0; column < kPanelColumns; column += kLanes) {
        Vector::Reg block[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const char* from = reinterpret_cast<const char*>(data + (column + i) * weight.column_stride) + word * 4;
          block[i] = column + i < columns ? load_raw(from, bytes - word * 4) : Vector::zero();
        }
        Vector::transpose(block);
        for (int i = 0; i < kLanes; ++i) {  // a fixed count keeps the block in registers
          if (i < used) {
            Vector::store(to + (word + i) * kPanelColumns + column, block[i]);
          }
        }
      }
    }
    return;
  }
  Source* items = reinterpret_cast<Source*>(to);
  std::memset(to, 0, static_cast<size_t>(words * kPanelColumns) * sizeof(float));
  for (int64_t k = 0; k < weight.depth; ++k) {
    const Source* from = data + k * weight.depth_stride;
    Source* word = items + k / kPerWord * kPanelColumns * kPerWord + k % kPerWord;
    for (int64_t column = 0; column < columns; ++column) {
      word[column * kPerWord] = from[column * weight.column_stride];
    }
  }
}

template <class Source, class Target>
OSTINATO_INLINE void write_panel(const RowsTask& task, int64_t first_column, const float* sums) {
  const int64_t left = task.weight.columns - first_column;
  const int64_t columns = left < kPanelColumns ? left : kPanelColumns;
  const Source* bias = task.bias == nullptr ? nullptr : static_cast<const Source*>(task.bias) + first_column;
  for (int64_t r = 0; r < task.count; ++r) {
    Target* out = static_cast<Target*>(task.out) + (task.first + r) * task.out_stride + first_column;
    const float* sum = sums + r * kPanelColumns;
    if (bias != nullptr) {
      for (int64_t column = 0; column < columns; ++column) {
        narrow_to(sum[column] + widen(bias[column]), out + column);
      }
    } else {
      for (int64_t column = 0; column < columns; ++column) {
        narrow_to(sum[column], out + column);
      }
    }
  }
}

template <class Operand>
OSTINATO_KERNEL void multiply(const RowsTask& task, float* scratch) {
  typedef typename Operand::Source Source;
  const int64_t depth = task.weight.depth;
  const int64_t words = panel_words(depth, static_cast<int64_t>(sizeof(Source)));
  float* own_panel = scratch + gathered_floats(depth);
  float* sums = own_panel + depth * kPanelColumns;
  gather_rows<Operand>(task, scratch);
  for (int64_t panel = task.panel_begin; panel < task.panel_end; ++panel) {
    const float* weights = own_panel;
    if (task.weight.packed) {
      weights = static_cast<const float*>(task.weight.data) + panel * words * kPanelColumns;
    } else {
      pack_panel<Source>(task.weight, panel, own_panel);
    }
    multiply_panel<Operand>(task.count, scratch, weights, words, sums);
    if (task.out_float) {
      write_panel<Source, float>(task, panel * kPanelColumns, sums);
    } else {
      write_panel<Source, Source>(task, panel * kPanelColumns, sums);
    }
  }
}

template <class Target>
OSTINATO_KERNEL void combine(const CombineTask& task, float* scratch) {
  for (int64_t token = task.token_begin; token < task.token_end; ++token) {
    std::memset(scratch, 0, static_cast<size_t>(task.columns) * sizeof(float));
    for (int64_t j = token * task.choices; j < (token + 1) * task.choices; ++j) {
      if (task.slots[j] < 0) {
        continue;
      }
      const float* row = task.rows + task.slots[j] * task.columns;
      const float weight = task.weights[j];
      for (int64_t column = 0; column < task.columns; ++column) {
        scratch[column] += weight * row[column];
      }
    }
    Target* out = static_cast<Target*>(task.out) + token * task.columns;
    for (int64_t column = 0; column < task.columns; ++column) {
      narrow_to(scratch[column], out + column);
    }
  }
}

}  // namespace
}  // namespace ostinato
