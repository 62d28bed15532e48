// The attention kernel, written once over Vector and Format. Included by a kernel file after its vector header.
//
// Invariance: what a row (one query token, one head) computes depends on its query, on the keys and values it may see
// and on their absolute positions alone. A key that it may not see gets the weight 0, which leaves every sum as it
// was, so it does not matter which other rows share the tile. Rows that share a tile never mix: there is no sum across
// rows, and the register tile is the same sequence of operations for 1 row and for 8.
#pragma once

#include "formats.h"
#include "workspace.h"

namespace ostinato {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kMinusInfinity = -__builtin_huge_valf();

// 2^x for x <= 127. Exactly 1 at 0 and exactly 0 below -126; relative error below 2e-7 (Taylor series of 2^r for
// |r| <= 1/2, six terms). Keeps NaN.
OSTINATO_INLINE Vector::Reg exp2_of(Vector::Reg x) {
  const Vector::Reg lowest = Vector::broadcast(-126.0f);
  const Vector::Reg bounded = Vector::maximum(lowest, x);
  const Vector::Reg whole = Vector::round_nearest(bounded);
  const Vector::Reg rest = Vector::subtract(bounded, whole);
  Vector::Reg sum = Vector::broadcast(1.5403530393381610e-4f);
  sum = Vector::multiply_add(sum, rest, Vector::broadcast(1.3333558146428443e-3f));
  sum = Vector::multiply_add(sum, rest, Vector::broadcast(9.6181291076284772e-3f));
  sum = Vector::multiply_add(sum, rest, Vector::broadcast(5.5504108664821580e-2f));
  sum = Vector::multiply_add(sum, rest, Vector::broadcast(2.4022650695910071e-1f));
  sum = Vector::multiply_add(sum, rest, Vector::broadcast(6.9314718055994531e-1f));
  sum = Vector::multiply_add(sum, rest, Vector::broadcast(1.0f));
  return Vector::zero_below(Vector::scale_by_power(sum, whole), x, lowest);
}

// Raw dot products to base-2 logits: scale * log2(e) * s, or softcap * log2(e) * tanh(scale * s / softcap).
OSTINATO_INLINE Vector::Reg logit_of(Vector::Reg score, float scale, float softcap) {
  if (softcap <= 0.0f) {
    return Vector::multiply(score, Vector::broadcast(scale * kLog2E));
  }
  // tanh(u) = 2 / (1 + e^(-2u)) - 1
  const Vector::Reg exponent = Vector::multiply(score, Vector::broadcast(-2.0f * kLog2E * (scale / softcap)));
  const Vector::Reg power = exp2_of(Vector::minimum(Vector::broadcast(126.0f), exponent));
  const Vector::Reg one = Vector::broadcast(1.0f);
  const Vector::Reg tanh = Vector::subtract(Vector::divide(Vector::broadcast(2.0f), Vector::add(one, power)), one);
  return Vector::multiply(tanh, Vector::broadcast(softcap * kLog2E));
}

// to[r][c] = (rescale ? to[r][c] * rescale[r] : 0) + sum over s of a[r][s] . b[s][c], s in order.
template <class Format, int Rows>
OSTINATO_INLINE void tile_product(const float* a, int64_t a_stride, const float* b, int64_t columns, int64_t steps,
                                  float* to, const float* rescale) {
  for (int64_t column = 0; column < columns; column += 2 * kLanes) {
    Vector::Reg left[Rows];
    Vector::Reg right[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      if (rescale != nullptr) {
        const Vector::Reg factor = Vector::broadcast(rescale[r]);
        left[r] = Vector::multiply(Vector::load(to + r * columns + column), factor);
        right[r] = Vector::multiply(Vector::load(to + r * columns + column + kLanes), factor);
      } else {
        left[r] = Vector::zero();
        right[r] = Vector::zero();
      }
    }
    const float* step_b = b + column;
    for (int64_t s = 0; s < steps; ++s) {
      const Vector::Reg b_left = Vector::load(step_b);
      const Vector::Reg b_right = Vector::load(step_b + kLanes);
      step_b += columns;
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const Vector::Reg factor = Vector::broadcast(a[r * a_stride + s]);
        left[r] = Format::dot(factor, b_left, left[r]);
        right[r] = Format::dot(factor, b_right, right[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      Vector::store(to + r * columns + column, left[r]);
      Vector::store(to + r * columns + column + kLanes, right[r]);
    }
  }
}

// The keys that each row may see, first and last position inclusive.
struct RowSpans {
  int64_t first[kBlockRows];
  int64_t last[kBlockRows];
  int64_t lowest;
  int64_t highest;
};

OSTINATO_KERNEL void find_spans(const AttentionProblem& problem, const AttentionTask& task, RowSpans* spans) {
  for (int64_t row = 0; row < task.rows; ++row) {
    const int64_t position = task.context + (task.first_row + row) / problem.group_size;
    spans->first[row] = first_visible(problem, position);
    spans->last[row] = position;
  }
  spans->lowest = spans->first[0];  // both bounds grow with the position, and rows are in order of position
  spans->highest = spans->last[task.rows - 1];
}

OSTINATO_INLINE void reset_state(const SoftmaxState& state, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < kBlockRows; ++row) {
    state.maximum[row] = kMinusInfinity;
    state.sum[row] = 0.0f;
  }
  std::memset(state.accumulator, 0, static_cast<size_t>(rows * columns) * sizeof(float));
}

// Addresses of the rows of the tile at `tile`; table entries outside [lowest, highest] are never read.
OSTINATO_KERNEL void locate_tile(const AttentionProblem& problem, const AttentionTask& task, const RowSpans& spans,
                                 int64_t tile, int64_t item_bytes, const float* zeros, TileRows* rows) {
  const int64_t begin = spans.lowest > tile ? spans.lowest : tile;
  const int64_t end = spans.highest + 1 < tile + kTileKeys ? spans.highest + 1 : tile + kTileKeys;
  const char* nothing = reinterpret_cast<const char*>(zeros);
  for (int64_t i = 0; i < kTileKeys; ++i) {
    rows->keys[i] = nothing;
    rows->values[i] = nothing;
  }
  const int32_t* table = problem.block_table + task.sequence * problem.table_stride;
  const char* key_base = static_cast<const char*>(problem.keys.data);
  const char* value_base = static_cast<const char*>(problem.values.data);
  int64_t page = begin / problem.block_size;
  int64_t offset = begin % problem.block_size;
  for (int64_t position = begin; position < end; ++position) {
    const int64_t block = table[page];
    const int64_t key_item = block * problem.keys.block_stride + task.kv_head * problem.keys.head_stride +
                             offset * problem.keys.token_stride;
    const int64_t value_item = block * problem.values.block_stride + task.kv_head * problem.values.head_stride +
                               offset * problem.values.token_stride;
    rows->keys[position - tile] = key_base + key_item * item_bytes;
    rows->values[position - tile] = value_base + value_item * item_bytes;
    ++offset;
    if (offset == problem.block_size) {
      offset = 0;
      ++page;
    }
  }
}

// One step of the online softmax: `count` rows of scores become weights, and `rescale` the factor of what was there.
template <class Format>
OSTINATO_INLINE void weigh(const AttentionProblem& problem, const RowSpans& spans, int64_t tile, int64_t first_row,
                           int count, const Workspace& workspace, float* maximum, float* rescale) {
  float reference[kLanes] = {};
  float previous[kLanes] = {};
  for (int r = 0; r < count; ++r) {
    float* scores = workspace.scores + r * kTileKeys;
    for (int64_t key = 0; key < kTileKeys; key += kLanes) {
      Vector::store(scores + key, logit_of(Vector::load(scores + key), problem.scale, problem.softcap));
    }
    const int64_t hidden_below = spans.first[first_row + r] - tile;
    const int64_t hidden_from = spans.last[first_row + r] - tile + 1;
    for (int64_t key = 0; key < hidden_below && key < kTileKeys; ++key) {
      scores[key] = kMinusInfinity;
    }
    for (int64_t key = hidden_from < 0 ? 0 : hidden_from; key < kTileKeys; ++key) {
      scores[key] = kMinusInfinity;
    }
    Vector::Reg top = Vector::load(scores);
    for (int64_t key = kLanes; key < kTileKeys; key += kLanes) {
      top = Vector::maximum(top, Vector::load(scores + key));
    }
    const float tile_top = Vector::reduce_max(top);
    previous[r] = maximum[r];
    maximum[r] = tile_top > maximum[r] ? tile_top : maximum[r];
    reference[r] = maximum[r] == kMinusInfinity ? 0.0f : maximum[r];
  }
  static_assert(Vector::kRows <= kLanes, "the factors of a register tile fit one vector");
  Vector::store(rescale, exp2_of(Vector::subtract(Vector::load(previous), Vector::load(reference))));
  for (int r = 0; r < count; ++r) {
    const float* scores = workspace.scores + r * kTileKeys;
    float* weights = workspace.weights + r * kTileKeys;
    float* lane_sums = workspace.lane_sums + (first_row + r) * kLanes;
    const Vector::Reg top = Vector::broadcast(reference[r]);
    Vector::Reg sums = Vector::multiply(Vector::load(lane_sums), Vector::broadcast(rescale[r]));
    for (int64_t key = 0; key < kTileKeys; key += 2 * kLanes) {
      const Vector::Reg left = exp2_of(Vector::subtract(Vector::load(scores + key), top));
      const Vector::Reg right = exp2_of(Vector::subtract(Vector::load(scores + key + kLanes), top));
      sums = Vector::add(sums, Vector::add(left, right));
      Format::store_weights(left, right, weights + key);
    }
    Vector::store(lane_sums, sums);
  }
}

template <class Format, int Rows>
OSTINATO_KERNEL void attend_rows(const AttentionProblem& problem, const RowSpans& spans, int64_t tile,
                                 int64_t first_row, const Workspace& workspace, const SoftmaxState& state) {
  const int64_t elements = Format::elements(problem.keys.dim);
  const int64_t columns = padded_columns(problem.values.dim);
  const float* query = workspace.query + first_row * elements;
  float rescale[kLanes];
  tile_product<Format, Rows>(query, elements, workspace.keys, kTileKeys, elements, workspace.scores, nullptr);
  weigh<Format>(problem, spans, tile, first_row, Rows, workspace, state.maximum + first_row, rescale);
  tile_product<Format, Rows>(workspace.weights, kTileKeys, workspace.values, columns,
                             kTileKeys / Format::kKeysPerStep, state.accumulator + first_row * columns, rescale);
}

template <class Format, int Rows>
OSTINATO_INLINE void attend_remainder(int64_t count, const AttentionProblem& problem, const RowSpans& spans,
                                      int64_t tile, int64_t first_row, const Workspace& workspace,
                                      const SoftmaxState& state) {
  if (count == Rows) {
    attend_rows<Format, Rows>(problem, spans, tile, first_row, workspace, state);
  } else if constexpr (Rows > 1) {
    attend_remainder<Format, Rows - 1>(count, problem, spans, tile, first_row, workspace, state);
  }
}

template <class Format>
OSTINATO_KERNEL void attend_partition(const AttentionProblem& problem, const AttentionTask& task,
                                      const RowSpans& spans, int64_t part, const Workspace& workspace,
                                      const SoftmaxState& state) {
  constexpr int64_t kItemBytes = static_cast<int64_t>(sizeof(typename Format::Source));
  const int64_t columns = padded_columns(problem.values.dim);
  const int64_t lowest_tile = spans.lowest / kTileKeys * kTileKeys;
  const int64_t part_end = (part + 1) * kPartitionKeys;
  const int64_t begin = lowest_tile > part * kPartitionKeys ? lowest_tile : part * kPartitionKeys;
  const int64_t end = spans.highest + 1 < part_end ? spans.highest + 1 : part_end;
  reset_state(state, task.rows, columns);
  std::memset(workspace.lane_sums, 0, static_cast<size_t>(kBlockRows * kLanes) * sizeof(float));
  TileRows rows;
  TileRows next_rows;
  if (begin < end) {
    locate_tile(problem, task, spans, begin, kItemBytes, workspace.zeros, &next_rows);
  }
  for (int64_t tile = begin; tile < end; tile += kTileKeys) {
    rows = next_rows;
    // The next tile is fetched while this one is packed, a line at a time: a burst of prefetches would stall. Beyond
    // the last tile of a partition it is the next partition's first, or zeros.
    locate_tile(problem, task, spans, tile + kTileKeys, kItemBytes, workspace.zeros, &next_rows);
    pack_keys<Format>(rows, next_rows, problem.keys.dim, workspace.keys);
    pack_values<Format>(rows, next_rows, problem.values.dim, columns, workspace.values);
    for (int64_t row = 0; row < task.rows; row += Vector::kRows) {
      const int64_t count = task.rows - row < Vector::kRows ? task.rows - row : Vector::kRows;
      const bool sees_tile = spans.first[row] < tile + kTileKeys && spans.last[row + count - 1] >= tile;
      if (sees_tile) {
        attend_remainder<Format, Vector::kRows>(count, problem, spans, tile, row, workspace, state);
      }
    }
  }
  for (int64_t row = 0; row < task.rows; ++row) {
    state.sum[row] = Vector::reduce_add(Vector::load(workspace.lane_sums + row * kLanes));
  }
}

// total = total merged with part; the caller goes through partitions from left to right.
OSTINATO_KERNEL void fold(const SoftmaxState& part, int64_t rows, int64_t columns, const SoftmaxState& total) {
  float keep[kBlockRows];
  float gain[kBlockRows];
  float reference[kBlockRows];
  for (int64_t row = 0; row < kBlockRows; ++row) {
    const float top = part.maximum[row] > total.maximum[row] ? part.maximum[row] : total.maximum[row];
    reference[row] = top == kMinusInfinity ? 0.0f : top;
  }
  for (int64_t row = 0; row < kBlockRows; row += kLanes) {
    const Vector::Reg top = Vector::load(reference + row);
    const Vector::Reg kept = exp2_of(Vector::subtract(Vector::load(total.maximum + row), top));
    const Vector::Reg gained = exp2_of(Vector::subtract(Vector::load(part.maximum + row), top));
    const Vector::Reg added = Vector::multiply(Vector::load(part.sum + row), gained);
    Vector::store(total.sum + row, Vector::multiply_add(Vector::load(total.sum + row), kept, added));
    Vector::store(keep + row, kept);
    Vector::store(gain + row, gained);
  }
  for (int64_t row = 0; row < rows; ++row) {
    const Vector::Reg kept = Vector::broadcast(keep[row]);
    const Vector::Reg gained = Vector::broadcast(gain[row]);
    for (int64_t column = row * columns; column < (row + 1) * columns; column += kLanes) {
      const Vector::Reg added = Vector::multiply(Vector::load(part.accumulator + column), gained);
      const Vector::Reg old = Vector::load(total.accumulator + column);
      Vector::store(total.accumulator + column, Vector::multiply_add(old, kept, added));
    }
    total.maximum[row] = part.maximum[row] > total.maximum[row] ? part.maximum[row] : total.maximum[row];
  }
}

// out = accumulator / (sum + 2^(sink - maximum))
template <class Source>
OSTINATO_KERNEL void write_rows(const AttentionProblem& problem, const AttentionTask& task,
                                const SoftmaxState& total) {
  const int64_t columns = padded_columns(problem.values.dim);
  for (int64_t row = 0; row < task.rows; ++row) {
    const int64_t token = task.query_start + (task.first_row + row) / problem.group_size;
    const int64_t head = task.kv_head * problem.group_size + (task.first_row + row) % problem.group_size;
    float numerator = 1.0f;
    float sum = total.sum[row];
    if (problem.sinks != nullptr) {
      const float sink = problem.sinks[head] * kLog2E;
      const float top = sink > total.maximum[row] ? sink : total.maximum[row];
      float powers[kLanes] = {};
      powers[0] = total.maximum[row] - top;
      powers[1] = sink - top;
      Vector::store(powers, exp2_of(Vector::load(powers)));
      numerator = powers[0];
      sum = sum * powers[0] + powers[1];
    }
    const float factor = numerator / sum;
    const float* accumulator = total.accumulator + row * columns;
    Source* out = static_cast<Source*>(problem.out) + token * problem.out_token_stride + head * problem.out_head_stride;
    for (int64_t column = 0; column < problem.values.dim; ++column) {
      narrow_to(accumulator[column] * factor + 0.0f, out + column);  // + 0: no negative zero, whatever was hidden
    }
  }
}

template <class Format>
OSTINATO_KERNEL void attend(const AttentionProblem& problem, const AttentionTask& task, float* scratch) {
  typedef typename Format::Source Source;
  Workspace workspace = {};
  lay_out(problem, scratch, &workspace);
  const int64_t columns = padded_columns(problem.values.dim);
  const int64_t elements = Format::elements(problem.keys.dim);
  const int64_t row_floats = problem.keys.dim > problem.values.dim ? problem.keys.dim : problem.values.dim;
  std::memset(workspace.zeros, 0, static_cast<size_t>(row_floats) * sizeof(float));
  for (int64_t row = 0; row < task.rows; ++row) {
    const int64_t token = task.query_start + (task.first_row + row) / problem.group_size;
    const int64_t head = task.kv_head * problem.group_size + (task.first_row + row) % problem.group_size;
    const Source* from = static_cast<const Source*>(problem.query) + token * problem.query_token_stride +
                         head * problem.query_head_stride;
    Format::load_query(from, problem.keys.dim, workspace.query + row * elements);
  }
  RowSpans spans;
  find_spans(problem, task, &spans);
  if (task.partial != nullptr) {
    attend_partition<Format>(problem, task, spans, task.part_begin, workspace, state_at(task.partial));
    return;
  }
  reset_state(workspace.total, task.rows, columns);
  for (int64_t part = task.part_begin; part < task.part_end; ++part) {
    attend_partition<Format>(problem, task, spans, part, workspace, workspace.part);
    fold(workspace.part, task.rows, columns, workspace.total);
  }
  write_rows<Source>(problem, task, workspace.total);
}

template <class Source>
OSTINATO_KERNEL void merge(const AttentionProblem& problem, const AttentionTask& task, const float* states,
                           int64_t count, float* scratch) {
  Workspace workspace = {};
  lay_out(problem, scratch, &workspace);
  const int64_t columns = padded_columns(problem.values.dim);
  const int64_t state = state_floats(task.rows, problem.values.dim);
  reset_state(workspace.total, task.rows, columns);
  for (int64_t i = 0; i < count; ++i) {
    fold(state_at(const_cast<float*>(states) + i * state), task.rows, columns, workspace.total);
  }
  write_rows<Source>(problem, task, workspace.total);
}

}  // namespace
}  // namespace ostinato
