// Mamba-2 (SSD) over one head of one sequence. Included by a kernel file after scan_rows.h.
//
// Rows of the state (along P) do not depend on each other: kLanes of them are walked through a block of rows before the
// next ones. Vectors lie along N; the kLanes sums of a group are transposed and added up, so that none crosses lanes.
#pragma once

#include "scan_rows.h"

namespace ostinato {
namespace {

struct StateSpaceRows {
  int64_t height;   // P, padded
  int64_t width;    // N, padded
  float* state;     // [height][width]
  float* inputs;    // [kScanRows][height]
  float* weighted;  // [kScanRows][height]: dt x
  float* out;       // [kScanRows][height]
  float* b;         // [kScanRows][width]
  float* c;         // [kScanRows][width]
  float* dt;        // [kScanRows]
  float* decay;     // [kScanRows]
};

OSTINATO_INLINE StateSpaceRows state_space_rows(const StateSpaceProblem& problem, float* memory) {
  ScanMemory left = {memory};
  StateSpaceRows rows;
  rows.height = padded(problem.head_dim, kScanPad);
  rows.width = padded(problem.state_dim, kScanPad);
  rows.state = cut(&left, rows.height * rows.width);
  rows.inputs = cut(&left, kScanRows * rows.height);
  rows.weighted = cut(&left, kScanRows * rows.height);
  rows.out = cut(&left, kScanRows * rows.height);
  rows.b = cut(&left, kScanRows * rows.width);
  rows.c = cut(&left, kScanRows * rows.width);
  rows.dt = cut(&left, kScanRows);
  rows.decay = cut(&left, kScanRows);
  return rows;
}

OSTINATO_INLINE float* state_of_head(const StateSpaceProblem& problem, int64_t page, int64_t head) {
  return static_cast<float*>(problem.states.data) + page * problem.states.page_stride +
         head * problem.head_dim * problem.state_dim;
}

OSTINATO_KERNEL void load_head(const StateSpaceProblem& problem, int64_t page, int64_t head, const StateSpaceRows& rows) {
  const bool whole = rows.height == problem.head_dim && rows.width == problem.state_dim;
  if (page < 0 || !whole) {
    std::memset(rows.state, 0, static_cast<size_t>(rows.height * rows.width) * sizeof(float));
  }
  if (page < 0) {
    return;
  }
  const float* from = state_of_head(problem, page, head);
  for (int64_t p = 0; p < problem.head_dim; ++p) {
    std::memcpy(rows.state + p * rows.width, from + p * problem.state_dim,
                static_cast<size_t>(problem.state_dim) * sizeof(float));
  }
}

OSTINATO_KERNEL void store_head(const StateSpaceProblem& problem, int64_t page, int64_t head,
                                const StateSpaceRows& rows) {
  float* to = state_of_head(problem, page, head);
  for (int64_t p = 0; p < problem.head_dim; ++p) {
    std::memcpy(to + p * problem.state_dim, rows.state + p * rows.width,
                static_cast<size_t>(problem.state_dim) * sizeof(float));
  }
}

OSTINATO_KERNEL void prepare_state_space(const StateSpaceProblem& problem, const ScanBlock& block, int64_t head,
                                         const StateSpaceRows& rows) {
  const int64_t group = head / problem.heads_per_group;
  const Vector::Reg rate = Vector::broadcast(load_one(problem.a, head * problem.a.row));
  const float bias = problem.dt_bias.data == nullptr ? 0.0f : load_one(problem.dt_bias, head * problem.dt_bias.row);
  load_column(problem.dt, block, head, rows.dt);
  for (int64_t r = 0; r < kScanRows; r += kLanes) {
    Vector::Reg dt = Vector::add(Vector::load(rows.dt + r), Vector::broadcast(bias));
    dt = problem.softplus ? softplus_of(dt) : dt;
    dt = Vector::minimum(Vector::broadcast(problem.dt_max), Vector::maximum(Vector::broadcast(problem.dt_min), dt));
    Vector::store(rows.dt + r, dt);
    Vector::store(rows.decay + r, exp_of(Vector::multiply(dt, rate)));
  }
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t row = block.first + r;
    float* inputs = rows.inputs + r * rows.height;
    load_row(problem.inputs, row * problem.inputs.row + head * problem.inputs.inner, problem.head_dim, rows.height,
             inputs);
    load_row(problem.b, row * problem.b.row + group * problem.b.inner, problem.state_dim, rows.width,
             rows.b + r * rows.width);
    load_row(problem.c, row * problem.c.row + group * problem.c.inner, problem.state_dim, rows.width,
             rows.c + r * rows.width);
    const Vector::Reg dt = Vector::broadcast(rows.dt[r]);
    for (int64_t p = 0; p < rows.height; p += kLanes) {
      Vector::store(rows.weighted + r * rows.height + p, Vector::multiply(Vector::load(inputs + p), dt));
    }
  }
}

// Adds the upper half of the vectors to the lower one until the first holds the sum of all. A recursion of fixed counts
// keeps them in registers.
template <int Half>
OSTINATO_INLINE void fold(Vector::Reg (&sums)[kLanes]) {
#pragma GCC unroll 8
  for (int i = 0; i < Half; ++i) {
    sums[i] = Vector::add(sums[i], sums[i + Half]);
  }
  if constexpr (Half > 1) {
    fold<Half / 2>(sums);
  }
}

// One row through kLanes rows of the state; returns their outputs, one per lane. `state`: [kLanes][width].
OSTINATO_INLINE Vector::Reg state_space_step(const StateSpaceRows& rows, int64_t r, const float* weighted,
                                             float* state) {
  const Vector::Reg decay = Vector::broadcast(rows.decay[r]);
  const float* b = rows.b + r * rows.width;
  const float* c = rows.c + r * rows.width;
  Vector::Reg sums[kLanes];
#pragma GCC unroll 16
  for (int p = 0; p < kLanes; ++p) {
    sums[p] = Vector::zero();
  }
  for (int64_t n = 0; n < rows.width; n += kLanes) {
    const Vector::Reg b_part = Vector::load(b + n);
    const Vector::Reg c_part = Vector::load(c + n);
#pragma GCC unroll 16
    for (int p = 0; p < kLanes; ++p) {
      float* at = state + p * rows.width + n;
      const Vector::Reg kept = Vector::multiply(Vector::load(at), decay);
      const Vector::Reg next = Vector::multiply_add(Vector::broadcast(weighted[p]), b_part, kept);
      Vector::store(at, next);
      sums[p] = Vector::multiply_add(next, c_part, sums[p]);
    }
  }
  Vector::transpose(sums);
  fold<kLanes / 2>(sums);
  return sums[0];
}

OSTINATO_KERNEL void state_space_steps(const StateSpaceRows& rows, int64_t count, float skip) {
  for (int64_t p = 0; p < rows.height; p += kLanes) {
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = r * rows.height + p;
      const Vector::Reg read = state_space_step(rows, r, rows.weighted + at, rows.state + p * rows.width);
      Vector::store(rows.out + at,
                    Vector::multiply_add(Vector::broadcast(skip), Vector::load(rows.inputs + at), read));
    }
  }
}

OSTINATO_KERNEL void scan_state_space(const StateSpaceProblem& problem, const ScanBatch& batch, int64_t sequence,
                                      int64_t head, float* memory) {
  const StateSpaceRows rows = state_space_rows(problem, memory);
  const float skip = problem.d.data == nullptr ? 0.0f : load_one(problem.d, head * problem.d.row);
  ScanCursor cursor = scan_start(batch, sequence);
  ScanBlock block;
  load_head(problem, batch.read[sequence], head, rows);
  while (next_block(batch, &cursor, &block)) {
    prepare_state_space(problem, block, head, rows);
    state_space_steps(rows, block.rows, skip);
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t offset = ((block.first + r) * problem.heads + head) * problem.head_dim;
      store_row(rows.out + r * rows.height, problem.head_dim, problem.out, offset);
    }
    if (block.page >= 0) {
      store_head(problem, block.page, head, rows);
    }
  }
}

}  // namespace
}  // namespace ostinato
