// Checks of what the scan operators are called with. Everything that can be wrong is refused here, before a task starts.
#pragma once

#include <initializer_list>
#include <optional>

#include "operators.h"
#include "scan_kernels.h"

namespace ostinato {

typedef std::initializer_list<int64_t> Shape;

inline void check_shape(const Tensor& tensor, Shape shape, const char* name) {
  bool fits = tensor.is_cpu() && tensor.dim() == static_cast<int64_t>(shape.size());
  int64_t dimension = 0;
  for (const int64_t size : shape) {
    fits = fits && tensor.size(dimension) == size;
    ++dimension;
  }
  STD_TORCH_CHECK(fits, name, " has the wrong shape, or is not on the CPU");
}

// [rows, channels] or [rows, heads, dim]; the last dimension must be contiguous.
inline RowView row_view(const Tensor& tensor, Shape shape, const char* name) {
  check_shape(tensor, shape, name);
  STD_TORCH_CHECK(tensor.numel() == 0 || has_dense_rows(tensor), name, ": the last dimension must be contiguous");
  return {tensor.data_ptr(), dtype_index(tensor), tensor.stride(0), tensor.stride(1)};
}

// One number per place of a vector or a matrix, at any strides.
inline RowView scalar_view(const Tensor& tensor, Shape shape, const char* name) {
  check_shape(tensor, shape, name);
  return {tensor.data_ptr(), dtype_index(tensor), tensor.stride(0), shape.size() > 1 ? tensor.stride(1) : 0};
}

inline RowView optional_view(const std::optional<Tensor>& tensor, int64_t size, const char* name) {
  return tensor.has_value() ? scalar_view(*tensor, {size}, name) : RowView{nullptr, 0, 0, 0};
}

inline OutView out_view(const Tensor& out, Shape shape, const char* name) {
  check_shape(out, shape, name);
  STD_TORCH_CHECK(out.is_contiguous(), name, " must be contiguous");
  return {out.data_ptr(), dtype_index(out)};
}

// [pages, ...shape]: dense but for the stride between pages.
inline StateView state_view(const Tensor& states, Shape shape, ScalarType dtype) {
  const int64_t dimensions = static_cast<int64_t>(shape.size()) + 1;
  STD_TORCH_CHECK(states.is_cpu() && states.dim() == dimensions, "states must be [pages, ...] on the CPU");
  STD_TORCH_CHECK(states.scalar_type() == dtype, "states have the wrong dtype");
  int64_t dense = 1;
  for (int64_t dimension = dimensions - 1; dimension > 0; --dimension) {
    const int64_t size = *(shape.begin() + dimension - 1);
    STD_TORCH_CHECK(states.size(dimension) == size, "states differ from the inputs in dimension ", dimension);
    STD_TORCH_CHECK(size <= 1 || states.stride(dimension) == dense, "the state of a page must be contiguous");
    dense *= size;
  }
  STD_TORCH_CHECK(states.size(0) <= 1 || states.stride(0) >= dense, "the states of two pages overlap");
  return {states.data_ptr(), states.stride(0)};
}

// The tensors of a StateIndex, in its order.
struct IndexTensors {
  const Tensor& cu_q;
  const Tensor& read;
  const Tensor& cu_stops;
  const Tensor& stops;
  const Tensor& pages;
};

// Refuses an index that leaves rows out, keeps no state at the end of a sequence, names pages that do not exist, or
// would let two sequences touch one page of which either writes.
ScanBatch checked_batch(const IndexTensors& index, int64_t rows, int64_t page_count);

const ScanTable& scans_for(int64_t isa);

}  // namespace ostinato
