// Operators of mixtures of experts and of other products whose rows must not depend on each other: packing of weights,
// the order of (token, expert) pairs, grouped products, the weighted sum per token, and a plain linear layer.
#include <algorithm>
#include <vector>

#include "gemm_rows.h"
#include "operators.h"
#include "tasks.h"

namespace ostinato {
namespace {

const GemmTable& gemm_for(int64_t isa) {
  kernels_for(isa);  // throws when this processor lacks it
  switch (isa < 0 ? best_isa() : static_cast<Isa>(isa)) {
    case Isa::avx512_bf16:
      return *avx512_bf16_gemm();
    case Isa::avx512:
      return *avx512_gemm();
    case Isa::avx2:
      return *avx2_gemm();
    default:
      return *portable_gemm();
  }
}

// `groups` are tasks over any number of rows and all panels; they are cut into blocks of rows and, where there are too
// few of those to keep the threads busy, into ranges of panels.
void run(const std::vector<RowsTask>& groups, const GemmTable& kernels, int dtype) {
  constexpr int64_t kItemsPerThread = 4;
  int64_t cost = 0;
  int64_t blocks = 0;
  int64_t depth = 0;
  for (const RowsTask& group : groups) {
    cost += group.count * group.weight.columns * group.weight.depth;
    blocks += (group.count + kGatherRows - 1) / kGatherRows;
    depth = std::max(depth, group.weight.depth);
  }
  if (blocks == 0) {
    return;
  }
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t wanted = threads == 1 ? 1 : (threads * kItemsPerThread + blocks - 1) / blocks;
  std::vector<RowsTask> items;
  for (const RowsTask& group : groups) {
    const int64_t panels = panel_count(group.weight.columns);
    const int64_t cuts = std::min(wanted, panels);
    for (int64_t done = 0; done < group.count; done += kGatherRows) {
      for (int64_t cut = 0; cut < cuts; ++cut) {
        RowsTask item = group;
        item.first = group.first + done;
        item.count = std::min(kGatherRows, group.count - done);
        item.panel_begin = panels * cut / cuts;
        item.panel_end = panels * (cut + 1) / cuts;
        items.push_back(item);
      }
    }
  }
  const int64_t count = static_cast<int64_t>(items.size());
  run_tasks(count, cost, gemm_scratch_floats(depth), [&](int64_t item, float* memory) {
    kernels.multiply[dtype](items[static_cast<size_t>(item)], memory);
  });
}

void check_matrix(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.dim() == 2 && has_dense_rows(tensor), name,
                  " must be a matrix on the CPU, rows contiguous");
}

const int32_t* checked_vector(const Tensor& tensor, int64_t count, const char* name) {
  check_int32(tensor, 1, name);
  STD_TORCH_CHECK(tensor.size(0) >= count, name, " has fewer than ", count, " entries");
  return static_cast<const int32_t*>(tensor.data_ptr());
}

WeightView plain_view(const Tensor& weight, int64_t group) {
  const char* data = static_cast<const char*>(weight.data_ptr());
  data += group * weight.stride(0) * static_cast<int64_t>(weight.element_size());
  return {data, weight.size(1), weight.size(2), false, weight.stride(1), weight.stride(2)};
}

// weight [groups, columns, depth], any strides -> packed [groups, panels, words, 32] float, or [.., 32, 2] bfloat16
void pack_weights(const Tensor weight, Tensor packed) {
  STD_TORCH_CHECK(weight.is_cpu() && weight.dim() == 3, "weight must be [groups, columns, depth] on the CPU");
  STD_TORCH_CHECK(packed.is_cpu() && packed.is_contiguous() && packed.scalar_type() == weight.scalar_type(),
                  "packed must be contiguous and of the weight's dtype");
  const int dtype = dtype_index(weight);
  const int64_t panels = panel_count(weight.size(1));
  const int64_t item = static_cast<int64_t>(weight.element_size());
  const int64_t panel_floats = panel_words(weight.size(2), item) * kPanelColumns;
  STD_TORCH_CHECK(packed.numel() * item == weight.size(0) * panels * panel_floats * 4, "packed has the wrong size");
  const GemmTable& kernels = gemm_for(-1);
  float* to = static_cast<float*>(packed.data_ptr());
  run_tasks(weight.size(0) * panels, weight.numel(), 1, [&](int64_t i, float*) {
    kernels.pack_panel[dtype](plain_view(weight, i / panels), i % panels, to + i * panel_floats);
  });
}

// Sorts the pairs (token, choice) by expert, stable.
//   offsets [experts + 1]: expert e has the pairs offsets[e] .. offsets[e + 1]
//   tokens  [pairs]: the token of each sorted pair        slots [pairs]: where pair (token, choice) went, or -1
void order_experts(const Tensor choices, Tensor offsets, Tensor tokens, Tensor slots) {
  STD_TORCH_CHECK(choices.is_cpu() && choices.dim() == 2 && choices.scalar_type() == ScalarType::Long &&
                      choices.is_contiguous(),
                  "choices must be contiguous int64 [tokens, choices] on the CPU");
  const int64_t pairs = choices.numel();
  checked_vector(tokens, pairs, "tokens");
  checked_vector(slots, pairs, "slots");
  checked_vector(offsets, 1, "offsets");
  const int64_t experts = offsets.size(0) - 1;
  const int64_t* expert = static_cast<const int64_t*>(choices.data_ptr());
  int32_t* start = static_cast<int32_t*>(offsets.data_ptr());
  int32_t* token = static_cast<int32_t*>(tokens.data_ptr());
  int32_t* slot = static_cast<int32_t*>(slots.data_ptr());
  std::vector<int32_t> next(static_cast<size_t>(experts + 1), 0);
  for (int64_t i = 0; i < pairs; ++i) {
    if (expert[i] >= 0 && expert[i] < experts) {
      ++next[static_cast<size_t>(expert[i] + 1)];
    }
  }
  for (int64_t e = 0; e < experts; ++e) {
    next[static_cast<size_t>(e + 1)] += next[static_cast<size_t>(e)];
  }
  std::copy(next.begin(), next.end(), start);
  for (int64_t i = 0; i < pairs; ++i) {
    slot[i] = -1;
    if (expert[i] >= 0 && expert[i] < experts) {
      slot[i] = next[static_cast<size_t>(expert[i])]++;
      token[slot[i]] = static_cast<int32_t>(i / choices.size(1));
    }
  }
}

// out[p] = rows[index[p]] . packed[e] + bias[e] for the pairs p of each expert e; without an index rows[p].
void multiply_experts(const Tensor rows, std::optional<Tensor> index, const Tensor offsets, const Tensor packed,
                      std::optional<Tensor> bias, Tensor out, int64_t isa) {
  check_matrix(rows, "rows");
  check_matrix(out, "out");
  const int64_t experts = packed.size(0);
  const int64_t depth = rows.size(1);
  const int64_t columns = out.size(1);
  const int64_t item = static_cast<int64_t>(rows.element_size());
  const int64_t weight_bytes = panel_count(columns) * panel_words(depth, item) * kPanelColumns * 4;
  STD_TORCH_CHECK(packed.is_cpu() && packed.is_contiguous() && packed.scalar_type() == rows.scalar_type() &&
                      packed.numel() * item == experts * weight_bytes,
                  "packed weights do not fit the rows and the output");
  const bool out_float = out.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(out_float || out.scalar_type() == rows.scalar_type(), "out must be float32 or like the rows");
  const int32_t* start = checked_vector(offsets, experts + 1, "offsets");
  const int64_t pairs = start[experts];
  STD_TORCH_CHECK(out.size(0) >= pairs, "out has too few rows");
  const int32_t* from = index.has_value() ? checked_vector(*index, pairs, "index") : nullptr;
  for (int64_t p = 0; from != nullptr && p < pairs; ++p) {
    STD_TORCH_CHECK(from[p] >= 0 && from[p] < rows.size(0), "index ", from[p], " is outside the rows");
  }
  STD_TORCH_CHECK(from != nullptr || rows.size(0) >= pairs, "there are fewer rows than pairs");
  STD_TORCH_CHECK(!bias.has_value() || (bias->is_contiguous() && bias->scalar_type() == rows.scalar_type() &&
                                        bias->numel() == experts * columns),
                  "bias must be contiguous [experts, columns] of the rows' dtype");
  std::vector<RowsTask> groups;
  for (int64_t e = 0; e < experts; ++e) {
    if (start[e + 1] > start[e]) {
      const WeightView weight = {static_cast<const char*>(packed.data_ptr()) + e * weight_bytes, columns, depth, true,
                                 0, 0};
      const char* added = bias.has_value() ? static_cast<const char*>(bias->data_ptr()) + e * columns * item : nullptr;
      groups.push_back({rows.data_ptr(), rows.stride(0), from, start[e], start[e + 1] - start[e], weight, added,
                        out.data_ptr(), out.stride(0), out_float, 0, 0});
    }
  }
  run(groups, gemm_for(isa), dtype_index(rows));
}

void combine_experts(const Tensor rows, const Tensor slots, const Tensor weights, Tensor out, int64_t isa) {
  check_matrix(rows, "rows");
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Float && rows.is_contiguous(), "rows must be float32, contiguous");
  STD_TORCH_CHECK(weights.is_cpu() && weights.dim() == 2 && weights.scalar_type() == ScalarType::Float &&
                      weights.is_contiguous(),
                  "weights must be contiguous float32 [tokens, choices]");
  STD_TORCH_CHECK(out.is_cpu() && out.dim() == 2 && out.is_contiguous() && out.size(0) == weights.size(0) &&
                      out.size(1) == rows.size(1),
                  "out must be contiguous [tokens, columns]");
  const int32_t* slot = checked_vector(slots, weights.numel(), "slots");
  for (int64_t i = 0; i < weights.numel(); ++i) {
    STD_TORCH_CHECK(slot[i] < rows.size(0), "slot ", slot[i], " is outside the rows");
  }
  const GemmTable& kernels = gemm_for(isa);
  const int dtype = dtype_index(out);
  const CombineTask task = {static_cast<const float*>(rows.data_ptr()), slot,
                            static_cast<const float*>(weights.data_ptr()), out.data_ptr(),
                            weights.size(1), rows.size(1), 0, 0};
  const int64_t tokens = out.size(0);
  const int64_t items = (tokens + 15) / 16;
  run_tasks(items, weights.numel() * rows.size(1), task.columns, [&](int64_t item, float* memory) {
    CombineTask part = task;
    part.token_begin = tokens * item / items;
    part.token_end = tokens * (item + 1) / items;
    kernels.combine[dtype](part, memory);
  });
}

// out[g] = rows[g] . weight[g]^T + bias; weight [groups, columns, depth] of any strides, packed during the call.
void multiply_rows(const Tensor rows, const Tensor weight, std::optional<Tensor> bias, Tensor out, int64_t isa) {
  STD_TORCH_CHECK(rows.is_cpu() && rows.dim() == 3 && has_dense_rows(rows), "rows must be [groups, rows, depth]");
  STD_TORCH_CHECK(weight.is_cpu() && weight.dim() == 3 && weight.scalar_type() == rows.scalar_type() &&
                      weight.size(0) == rows.size(0) && weight.size(2) == rows.size(2),
                  "weight must be [groups, columns, depth] of the rows' dtype");
  STD_TORCH_CHECK(out.is_cpu() && out.is_contiguous() && out.dim() == 3 && out.size(0) == rows.size(0) &&
                      out.size(1) == rows.size(1) && out.size(2) == weight.size(1) &&
                      out.scalar_type() == rows.scalar_type(),
                  "out must be contiguous [groups, rows, columns] of the rows' dtype");
  STD_TORCH_CHECK(!bias.has_value() || (bias->is_contiguous() && bias->numel() == weight.size(1) &&
                                        bias->scalar_type() == rows.scalar_type()),
                  "bias must be contiguous [columns] of the rows' dtype");
  const int64_t item = static_cast<int64_t>(rows.element_size());
  std::vector<RowsTask> groups;
  for (int64_t g = 0; g < rows.size(0); ++g) {
    groups.push_back({static_cast<const char*>(rows.data_ptr()) + g * rows.stride(0) * item, rows.stride(1), nullptr, 0,
                      rows.size(1), plain_view(weight, g), bias.has_value() ? bias->data_ptr() : nullptr,
                      static_cast<char*>(out.data_ptr()) + g * out.stride(0) * item, out.stride(1), false, 0, 0});
  }
  run(groups, gemm_for(isa), dtype_index(rows));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ostinato, library) {
  library.def("pack_weights(Tensor weight, Tensor(a!) packed) -> ()");
  library.def("order_experts(Tensor choices, Tensor(a!) offsets, Tensor(b!) tokens, Tensor(c!) slots) -> ()");
  library.def(
      "multiply_experts(Tensor rows, Tensor? index, Tensor offsets, Tensor packed, Tensor? bias, Tensor(a!) out, "
      "int isa=-1) -> ()");
  library.def("combine_experts(Tensor rows, Tensor slots, Tensor weights, Tensor(a!) out, int isa=-1) -> ()");
  library.def("multiply_rows(Tensor rows, Tensor weight, Tensor? bias, Tensor(a!) out, int isa=-1) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ostinato, CPU, library) {
  library.impl("pack_weights", TORCH_BOX(&pack_weights));
  library.impl("order_experts", TORCH_BOX(&order_experts));
  library.impl("multiply_experts", TORCH_BOX(&multiply_experts));
  library.impl("combine_experts", TORCH_BOX(&combine_experts));
  library.impl("multiply_rows", TORCH_BOX(&multiply_rows));
}

}  // namespace ostinato
