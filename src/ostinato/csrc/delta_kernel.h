// The gated delta rule over one head of one sequence. Included by a kernel file after scan_rows.h.
//
// The columns of the state (along Dv) do not depend on each other, so kScanColumns of them are walked through a block of
// rows before the next ones: their part of the state stays in the first-level cache.
//
//   local state   [Dv / 32][Dk][32]     column block, key, column; padded with zeros
//   per row       recall = (k * decay) S;  delta = beta (v - recall);  S = decay S + k (x) delta;  y = q S
#pragma once

#include "scan_rows.h"

namespace ostinato {
namespace {

constexpr int kColumnRegs = static_cast<int>(kScanColumns) / kLanes;

struct DeltaRows {
  int64_t keys;        // Dk, padded
  int64_t values;      // Dv, padded
  float* state;        // [values / kScanColumns][keys][kScanColumns]
  float* query;        // [kScanRows][keys]
  float* key;          // [kScanRows][keys]
  float* decayed_key;  // [kScanRows][keys]
  float* key_decay;    // [kScanRows][keys]: factors, with decay_per_key
  float* value;        // [kScanRows][values]
  float* out;          // [kScanRows][values]
  float* decay;        // [kScanRows]: factors, without decay_per_key
  float* beta;         // [kScanRows]
};

OSTINATO_INLINE DeltaRows delta_rows(const DeltaProblem& problem, float* memory) {
  ScanMemory left = {memory};
  DeltaRows rows;
  rows.keys = padded(problem.key_dim, kScanPad);
  rows.values = padded(problem.value_dim, kScanColumns);
  rows.state = cut(&left, rows.keys * rows.values);
  rows.query = cut(&left, kScanRows * rows.keys);
  rows.key = cut(&left, kScanRows * rows.keys);
  rows.decayed_key = cut(&left, kScanRows * rows.keys);
  rows.key_decay = cut(&left, kScanRows * rows.keys);
  rows.value = cut(&left, kScanRows * rows.values);
  rows.out = cut(&left, kScanRows * rows.values);
  rows.decay = cut(&left, kScanRows);
  rows.beta = cut(&left, kScanRows);
  return rows;
}

// Up to kScanColumns numbers; a fixed count is copied without a call.
OSTINATO_INLINE void copy_columns(const float* from, int64_t left, float* to) {
  if (left >= kScanColumns) {
    std::memcpy(to, from, static_cast<size_t>(kScanColumns) * sizeof(float));
  } else {
    std::memcpy(to, from, static_cast<size_t>(left) * sizeof(float));
  }
}

OSTINATO_KERNEL void load_delta_state(const DeltaProblem& problem, int64_t page, int64_t head, const DeltaRows& rows) {
  const bool whole = rows.keys == problem.key_dim && rows.values == problem.value_dim;
  if (page < 0 || !whole) {
    std::memset(rows.state, 0, static_cast<size_t>(rows.keys * rows.values) * sizeof(float));
  }
  if (page < 0) {
    return;
  }
  const float* from = static_cast<const float*>(problem.states.data) + page * problem.states.page_stride +
                      head * problem.key_dim * problem.value_dim;
  for (int64_t key = 0; key < problem.key_dim; ++key) {
    for (int64_t column = 0; column < problem.value_dim; column += kScanColumns) {
      const int64_t left = problem.value_dim - column;
      float* to = rows.state + column * rows.keys + key * kScanColumns;
      copy_columns(from, left, to);
      from += left < kScanColumns ? left : kScanColumns;
    }
  }
}

OSTINATO_KERNEL void store_delta_state(const DeltaProblem& problem, int64_t page, int64_t head, const DeltaRows& rows) {
  float* to = static_cast<float*>(problem.states.data) + page * problem.states.page_stride +
              head * problem.key_dim * problem.value_dim;
  for (int64_t key = 0; key < problem.key_dim; ++key) {
    for (int64_t column = 0; column < problem.value_dim; column += kScanColumns) {
      const int64_t left = problem.value_dim - column;
      const float* from = rows.state + column * rows.keys + key * kScanColumns;
      copy_columns(from, left, to);
      to += left < kScanColumns ? left : kScanColumns;
    }
  }
}

OSTINATO_INLINE void scale_row(float* row, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Vector::store(row + i, Vector::multiply(Vector::load(row + i), Vector::broadcast(factor)));
  }
}

// To length 1; the order of the sum depends on the padded length alone.
OSTINATO_INLINE void normalize_row(float* row, int64_t count) {
  Vector::Reg sums = Vector::zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector::Reg x = Vector::load(row + i);
    sums = Vector::multiply_add(x, x, sums);
  }
  scale_row(row, count, 1.0f / std::sqrt(Vector::reduce_add(sums) + 1e-6f));
}

OSTINATO_KERNEL void prepare_delta(const DeltaProblem& problem, const ScanBlock& block, int64_t head,
                                   const DeltaRows& rows) {
  const int64_t key_head = head / problem.heads_per_key;
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(problem.key_dim)));
  load_column(problem.beta, block, head, rows.beta);
  if (!problem.decay_per_key) {
    load_column(problem.decay, block, head, rows.decay);
    for (int64_t r = 0; r < kScanRows; r += kLanes) {
      Vector::store(rows.decay + r, exp_of(Vector::load(rows.decay + r)));
    }
  }
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t row = block.first + r;
    float* query = rows.query + r * rows.keys;
    float* key = rows.key + r * rows.keys;
    load_row(problem.query, row * problem.query.row + key_head * problem.query.inner, problem.key_dim, rows.keys, query);
    load_row(problem.key, row * problem.key.row + key_head * problem.key.inner, problem.key_dim, rows.keys, key);
    load_row(problem.value, row * problem.value.row + head * problem.value.inner, problem.value_dim, rows.values,
             rows.value + r * rows.values);
    if (problem.normalize) {
      normalize_row(query, rows.keys);
      normalize_row(key, rows.keys);
    }
    scale_row(query, rows.keys, scale);
    float* factor = rows.key_decay + r * rows.keys;
    if (problem.decay_per_key) {
      load_row(problem.decay, row * problem.decay.row + head * problem.decay.inner, problem.key_dim, rows.keys, factor);
    }
    for (int64_t i = 0; i < rows.keys; i += kLanes) {
      Vector::Reg decay = Vector::broadcast(rows.decay[r]);
      if (problem.decay_per_key) {
        decay = exp_of(Vector::load(factor + i));
        Vector::store(factor + i, decay);
      }
      Vector::store(rows.decayed_key + r * rows.keys + i, Vector::multiply(Vector::load(key + i), decay));
    }
  }
}

// One row through one block of columns. `state`: [keys][kScanColumns].
template <bool kDecayPerKey>
OSTINATO_INLINE void delta_step(const DeltaRows& rows, int64_t r, int64_t column, float* state) {
  const float* decayed_key = rows.decayed_key + r * rows.keys;
  Vector::Reg even[kColumnRegs];
  Vector::Reg odd[kColumnRegs];  // two chains of sums: additions are slow to finish
#pragma GCC unroll 8
  for (int c = 0; c < kColumnRegs; ++c) {
    even[c] = Vector::zero();
    odd[c] = Vector::zero();
  }
  for (int64_t i = 0; i < rows.keys; i += 2) {
    const float* from = state + i * kScanColumns;
    const Vector::Reg first = Vector::broadcast(decayed_key[i]);
    const Vector::Reg second = Vector::broadcast(decayed_key[i + 1]);
#pragma GCC unroll 8
    for (int c = 0; c < kColumnRegs; ++c) {
      even[c] = Vector::multiply_add(first, Vector::load(from + c * kLanes), even[c]);
      odd[c] = Vector::multiply_add(second, Vector::load(from + kScanColumns + c * kLanes), odd[c]);
    }
  }
  const float* value = rows.value + r * rows.values + column;
  const Vector::Reg beta = Vector::broadcast(rows.beta[r]);
  Vector::Reg delta[kColumnRegs];
  Vector::Reg sums[kColumnRegs];
#pragma GCC unroll 8
  for (int c = 0; c < kColumnRegs; ++c) {
    const Vector::Reg recall = Vector::add(even[c], odd[c]);
    delta[c] = Vector::multiply(beta, Vector::subtract(Vector::load(value + c * kLanes), recall));
    sums[c] = Vector::zero();
  }
  const float* query = rows.query + r * rows.keys;
  const float* key = rows.key + r * rows.keys;
  Vector::Reg decay = Vector::broadcast(rows.decay[r]);
  for (int64_t i = 0; i < rows.keys; ++i) {
    float* at = state + i * kScanColumns;
    if (kDecayPerKey) {
      decay = Vector::broadcast(rows.key_decay[r * rows.keys + i]);
    }
    const Vector::Reg k = Vector::broadcast(key[i]);
    const Vector::Reg q = Vector::broadcast(query[i]);
#pragma GCC unroll 8
    for (int c = 0; c < kColumnRegs; ++c) {
      const Vector::Reg kept = Vector::multiply(Vector::load(at + c * kLanes), decay);
      const Vector::Reg next = Vector::multiply_add(k, delta[c], kept);
      Vector::store(at + c * kLanes, next);
      sums[c] = Vector::multiply_add(q, next, sums[c]);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < kColumnRegs; ++c) {
    Vector::store(rows.out + r * rows.values + column + c * kLanes, sums[c]);
  }
}

template <bool kDecayPerKey>
OSTINATO_KERNEL void delta_steps(const DeltaRows& rows, int64_t count) {
  for (int64_t column = 0; column < rows.values; column += kScanColumns) {
    for (int64_t r = 0; r < count; ++r) {
      delta_step<kDecayPerKey>(rows, r, column, rows.state + column * rows.keys);
    }
  }
}

OSTINATO_KERNEL void scan_delta(const DeltaProblem& problem, const ScanBatch& batch, int64_t sequence, int64_t head,
                                float* memory) {
  const DeltaRows rows = delta_rows(problem, memory);
  ScanCursor cursor = scan_start(batch, sequence);
  ScanBlock block;
  load_delta_state(problem, batch.read[sequence], head, rows);
  while (next_block(batch, &cursor, &block)) {
    prepare_delta(problem, block, head, rows);
    if (problem.decay_per_key) {
      delta_steps<true>(rows, block.rows);
    } else {
      delta_steps<false>(rows, block.rows);
    }
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t offset = ((block.first + r) * problem.heads + head) * problem.value_dim;
      store_row(rows.out + r * rows.values, problem.value_dim, problem.out, offset);
    }
    if (block.page >= 0) {
      store_delta_state(problem, block.page, head, rows);
    }
  }
}

}  // namespace
}  // namespace ostinato
