// The kernel of per-head products, written once over Vector. Included by a kernel file after its vector header.
//
// Invariance: each number is one chain of multiply-adds in order of the inner index, in float32, in one code path; how
// many rows share a register tile changes nothing about it.
#pragma once

#include "absorb.h"
#include "formats.h"

namespace ostinato {
namespace {

// One step of the sum for one row: `x` is the row's part of the step, `low` and `high` two vectors of the panel.
struct FloatStep {
  typedef FloatFormat Rows;
  static constexpr int64_t kInner = 1;  // numbers of x per step
  static constexpr int64_t kXFloats = 1;
  OSTINATO_INLINE Vector::Reg add(const float* x, Vector::Reg w, Vector::Reg sum) {
    return Vector::multiply_add(Vector::broadcast(x[0]), w, sum);
  }
};

// bfloat16 without a bfloat16 unit.
struct WidenedStep {
  typedef WidenedFormat Rows;
  static constexpr int64_t kInner = 2;
  static constexpr int64_t kXFloats = 2;
  OSTINATO_INLINE Vector::Reg add(const float* x, Vector::Reg w, Vector::Reg sum) {
    const Vector::Reg even = Vector::multiply_add(Vector::broadcast(x[0]), Vector::low_half(w), sum);
    return Vector::multiply_add(Vector::broadcast(x[1]), Vector::high_half(w), even);
  }
};

#if defined(OSTINATO_AVX512_BF16)
struct PairStep {
  typedef PairFormat Rows;
  static constexpr int64_t kInner = 2;
  static constexpr int64_t kXFloats = 1;
  OSTINATO_INLINE Vector::Reg add(const float* x, Vector::Reg w, Vector::Reg sum) {
    return Vector::pair_dot(Vector::broadcast(x[0]), w, sum);
  }
};
#endif

// `count` numbers of one panel, from float32 to the dtype of the result.
OSTINATO_INLINE void store_columns(const float* sums, int64_t count, float* to) {
  std::memcpy(to, sums, static_cast<size_t>(count) * sizeof(float));
}
OSTINATO_INLINE void store_columns(const float* sums, int64_t count, uint16_t* to) {
#if defined(OSTINATO_AVX512_BF16)
  static_assert(kPanelColumns == 2 * kLanes, "a panel is narrowed at once");
  uint16_t narrow[kPanelColumns];
  Vector::store(reinterpret_cast<float*>(narrow), Vector::narrow(Vector::load(sums), Vector::load(sums + kLanes)));
  std::memcpy(to, narrow, static_cast<size_t>(count) * sizeof(uint16_t));
#else
  for (int64_t column = 0; column < count; ++column) {
    narrow_to(sums[column], to + column);
  }
#endif
}

// sums[r][c] = sum over s of x[r][s] . panel[s][c], s in order.
template <class Step, int Rows>
OSTINATO_INLINE void panel_product(const float* x, int64_t x_stride, const float* panel, int64_t steps, float* sums) {
  for (int64_t column = 0; column < kPanelColumns; column += 2 * kLanes) {
    Vector::Reg left[Rows];
    Vector::Reg right[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      left[r] = Vector::zero();
      right[r] = Vector::zero();
    }
    for (int64_t step = 0; step < steps; ++step) {
      const Vector::Reg w_left = Vector::load(panel + step * kPanelColumns + column);
      const Vector::Reg w_right = Vector::load(panel + step * kPanelColumns + column + kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const float* part = x + r * x_stride + step * Step::kXFloats;
        left[r] = Step::add(part, w_left, left[r]);
        right[r] = Step::add(part, w_right, right[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      Vector::store(sums + r * kPanelColumns + column, left[r]);
      Vector::store(sums + r * kPanelColumns + column + kLanes, right[r]);
    }
  }
}

template <class Step, int Rows>
OSTINATO_INLINE void panel_rows(int64_t count, const float* x, int64_t x_stride, const float* panel, int64_t steps,
                                float* sums) {
  if (count == Rows) {
    panel_product<Step, Rows>(x, x_stride, panel, steps, sums);
  } else if constexpr (Rows > 1) {
    panel_rows<Step, Rows - 1>(count, x, x_stride, panel, steps, sums);
  }
}

template <class Step>
OSTINATO_KERNEL void absorb_head(const AbsorbProblem& problem, const AbsorbTask& task) {
  typedef typename Step::Rows::Source Source;
  const int64_t steps = (problem.inner + Step::kInner - 1) / Step::kInner;
  const int64_t x_stride = steps * Step::kXFloats;
  const Source* x = static_cast<const Source*>(problem.x) + task.head * problem.x_head_stride;
  Source* out = static_cast<Source*>(problem.out) + task.head * problem.out_head_stride;
  for (int64_t row = 0; row < task.rows; ++row) {
    float* packed = task.scratch + row * x_stride;
    packed[x_stride - 1] = 0.0f;  // the unused half of an odd row
    Step::Rows::load_query(x + (task.first_row + row) * problem.x_row_stride, problem.inner, packed);
  }
  const float* w = static_cast<const float*>(problem.w) + task.head * problem.panels * steps * kPanelColumns;
  for (int64_t panel = 0; panel < problem.panels; ++panel) {
    const int64_t column = panel * kPanelColumns;
    const int64_t used = problem.columns - column < kPanelColumns ? problem.columns - column : kPanelColumns;
    for (int64_t row = 0; row < task.rows; row += Vector::kRows) {
      const int64_t count = task.rows - row < Vector::kRows ? task.rows - row : Vector::kRows;
      float sums[Vector::kRows * kPanelColumns];
      panel_rows<Step, Vector::kRows>(count, task.scratch + row * x_stride, x_stride,
                                      w + panel * steps * kPanelColumns, steps, sums);
      for (int64_t r = 0; r < count; ++r) {
        Source* to = out + (task.first_row + row + r) * problem.out_row_stride + column;
        store_columns(sums + r * kPanelColumns, used, to);
      }
    }
  }
}

}  // namespace
}  // namespace ostinato
