// The operators of the library, and checks that they share.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>

#include "kernels.h"

namespace ostinato {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void paged_attention(const Tensor query, const Tensor keys, const Tensor values, const Tensor block_table,
                     const Tensor cu_q, const Tensor seq_lens, Tensor out, double scale, int64_t window, int64_t chunk,
                     double softcap, std::optional<Tensor> sinks, int64_t isa);
void write_kv(const Tensor key, const Tensor value, Tensor key_pages, Tensor value_pages, const Tensor slots);
void copy_pages(const Tensor source, Tensor target, const Tensor source_index, const Tensor target_index);
Tensor argmax_rows(const Tensor logits, int64_t isa);

inline bool has_dense_rows(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return tensor.stride(last) == 1 || tensor.size(last) == 1;
}

inline void check_int32(const Tensor& tensor, int64_t dimensions, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == ScalarType::Int && tensor.dim() == dimensions &&
                      has_dense_rows(tensor),
                  name, " must be int32 on the CPU, with ", dimensions, " dimension(s), rows contiguous");
}

// Index into the tables of a KernelTable.
inline int dtype_index(const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, "dtype must be float32 or bfloat16");
  return dtype == ScalarType::Float ? 0 : 1;
}

}  // namespace ostinato
