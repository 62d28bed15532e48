// Operator paged_attention: checks its arguments, cuts the batch into tasks, runs them on torch's thread pool.
// Everything that can be wrong is refused here, before a task starts; tasks cannot fail.
#include "operators.h"
#include "tasks.h"

#include <algorithm>
#include <memory>
#include <vector>

namespace ostinato {
namespace {

struct Batch {
  const int32_t* cu_q;      // [sequences + 1]
  const int32_t* seq_lens;  // [sequences]
  int64_t sequences;
  int64_t kv_heads;
};

// A block of rows whose partitions are separate tasks; `first_state` counts floats in the shared state memory.
struct SplitBlock {
  AttentionTask task;
  int64_t first_state;
};

struct Plan {
  std::vector<AttentionTask> tasks;
  std::vector<SplitBlock> splits;
  int64_t state_floats = 0;
};

PageView page_view(const Tensor& pages) {
  return {pages.data_ptr(), pages.stride(0), pages.stride(1), pages.stride(2), pages.size(3)};
}

void check_shapes(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& out) {
  STD_TORCH_CHECK(query.dim() == 3 && out.dim() == 3, "query and out must be [tokens, heads, dim]");
  STD_TORCH_CHECK(keys.dim() == 4 && values.dim() == 4, "pages must be [blocks, kv_heads, block_size, dim]");
  for (const Tensor* tensor : {&query, &keys, &values, &out}) {
    STD_TORCH_CHECK(tensor->is_cpu(), "paged_attention takes CPU tensors");
    STD_TORCH_CHECK(tensor->scalar_type() == query.scalar_type(), "query, pages and out must share one dtype");
    STD_TORCH_CHECK(tensor->size(tensor->dim() - 1) > 0, "head dimensions must be positive");
    STD_TORCH_CHECK(has_dense_rows(*tensor), "the last dimension must be contiguous");
  }
  STD_TORCH_CHECK(keys.size(0) == values.size(0) && keys.size(1) == values.size(1) && keys.size(2) == values.size(2),
                  "key and value pages must agree in blocks, heads and block size");
  STD_TORCH_CHECK(keys.size(1) > 0 && keys.size(2) > 0, "pages must have heads and tokens");
  STD_TORCH_CHECK(query.size(2) == keys.size(3), "query and key pages differ in head dimension");
  STD_TORCH_CHECK(query.size(1) % keys.size(1) == 0, "query heads must be a multiple of KV heads");
  STD_TORCH_CHECK(out.size(0) == query.size(0) && out.size(1) == query.size(1) && out.size(2) == values.size(3),
                  "out must be [tokens, query heads, value dim]");
}

// Every table entry that a query of the batch can reach must name a block.
void check_batch(const AttentionProblem& problem, const Batch& batch, int64_t tokens, int64_t blocks,
                 int64_t table_columns) {
  STD_TORCH_CHECK(batch.cu_q[0] == 0 && batch.cu_q[batch.sequences] == tokens, "cu_q must span the query tokens");
  for (int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    const int64_t query_len = static_cast<int64_t>(batch.cu_q[sequence + 1]) - batch.cu_q[sequence];
    const int64_t seq_len = batch.seq_lens[sequence];
    STD_TORCH_CHECK(query_len >= 0 && query_len <= seq_len, "sequence ", sequence, " has ", query_len,
                    " query tokens of ", seq_len);
    if (query_len == 0) {
      continue;
    }
    const int64_t first_page = first_visible(problem, seq_len - query_len) / problem.block_size;
    const int64_t last_page = (seq_len - 1) / problem.block_size;
    STD_TORCH_CHECK(last_page < table_columns, "the block table of sequence ", sequence, " is too short");
    const int32_t* table = problem.block_table + sequence * problem.table_stride;
    for (int64_t page = first_page; page <= last_page; ++page) {
      STD_TORCH_CHECK(table[page] >= 0 && table[page] < blocks, "sequence ", sequence, " reads block table entry ",
                      page, ", which is ", table[page] < 0 ? "a hole" : "beyond the pool");
    }
  }
}

// One task per block of rows where there are enough of them to keep the threads busy, else one per partition as well.
// Both give the same bits: partitions are merged from left to right either way.
Plan make_plan(const AttentionProblem& problem, const Batch& batch, int64_t threads) {
  std::vector<AttentionTask> blocks;
  for (int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    const int64_t start = batch.cu_q[sequence];
    const int64_t query_len = batch.cu_q[sequence + 1] - start;
    const int64_t context = batch.seq_lens[sequence] - query_len;
    const int64_t rows = query_len * problem.group_size;
    for (int64_t head = 0; head < batch.kv_heads; ++head) {
      for (int64_t row = 0; row < rows; row += kBlockRows) {
        const int64_t count = std::min(kBlockRows, rows - row);
        const int64_t first = first_visible(problem, context + row / problem.group_size);
        const int64_t last = context + (row + count - 1) / problem.group_size;
        const int64_t cost = (last - first + 1) * (count + 8);  // packing a tile costs about as much as 8 rows
        blocks.push_back({sequence, head, start, context, row, count, first / kPartitionKeys,
                          last / kPartitionKeys + 1, nullptr, cost});
      }
    }
  }
  Plan plan;
  const bool split = threads > 1 && static_cast<int64_t>(blocks.size()) < 8 * threads;
  for (const AttentionTask& block : blocks) {
    if (!split || block.part_end - block.part_begin == 1) {
      plan.tasks.push_back(block);
      continue;
    }
    plan.splits.push_back({block, plan.state_floats});
    plan.state_floats += (block.part_end - block.part_begin) * state_floats(block.rows, problem.values.dim);
  }
  return plan;
}

void add_split_tasks(const AttentionProblem& problem, float* states, Plan* plan) {
  for (const SplitBlock& split : plan->splits) {
    float* state = states + split.first_state;
    for (int64_t part = split.task.part_begin; part < split.task.part_end; ++part) {
      AttentionTask task = split.task;
      task.part_begin = part;
      task.part_end = part + 1;
      task.partial = state;
      task.cost /= split.task.part_end - split.task.part_begin;
      plan->tasks.push_back(task);
      state += state_floats(task.rows, problem.values.dim);
    }
  }
}

void run(const AttentionProblem& problem, const Batch& batch, const KernelTable& kernels, int dtype) {
  Plan plan = make_plan(problem, batch, torch::stable::get_num_threads());
  std::unique_ptr<float[]> states(plan.state_floats > 0 ? new float[static_cast<size_t>(plan.state_floats)] : nullptr);
  add_split_tasks(problem, states.get(), &plan);
  int64_t cost = 0;
  for (const AttentionTask& task : plan.tasks) {
    cost += task.cost * (problem.keys.dim + problem.values.dim);
  }
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                   [](const AttentionTask& a, const AttentionTask& b) { return a.cost > b.cost; });
  const int64_t scratch_floats = kernels.scratch_floats(problem);
  run_tasks(static_cast<int64_t>(plan.tasks.size()), cost, scratch_floats, [&](int64_t item, float* memory) {
    kernels.attend[dtype](problem, plan.tasks[static_cast<size_t>(item)], memory);
  });
  run_tasks(static_cast<int64_t>(plan.splits.size()), cost, scratch_floats, [&](int64_t item, float* memory) {
    const SplitBlock& split = plan.splits[static_cast<size_t>(item)];
    const int64_t parts = split.task.part_end - split.task.part_begin;
    kernels.merge[dtype](problem, split.task, states.get() + split.first_state, parts, memory);
  });
}

}  // namespace

void paged_attention(const Tensor query, const Tensor keys, const Tensor values, const Tensor block_table,
                     const Tensor cu_q, const Tensor seq_lens, Tensor out, double scale, int64_t window, int64_t chunk,
                     double softcap, std::optional<Tensor> sinks, int64_t isa) {
  check_shapes(query, keys, values, out);
  check_int32(cu_q, 1, "cu_q");
  check_int32(seq_lens, 1, "seq_lens");
  check_int32(block_table, 2, "block_table");
  STD_TORCH_CHECK(scale > 0.0, "scale must be positive");
  STD_TORCH_CHECK(window >= 0 && chunk >= 0 && softcap >= 0.0, "window, chunk and softcap must not be negative");
  const Batch batch = {static_cast<const int32_t*>(cu_q.data_ptr()), static_cast<const int32_t*>(seq_lens.data_ptr()),
                       seq_lens.size(0), keys.size(1)};
  STD_TORCH_CHECK(cu_q.size(0) == batch.sequences + 1, "cu_q must have one entry more than seq_lens");
  STD_TORCH_CHECK(block_table.size(0) >= batch.sequences, "block_table has too few rows");
  const float* sink_logits = nullptr;
  if (sinks.has_value()) {
    STD_TORCH_CHECK(sinks->is_cpu() && sinks->scalar_type() == ScalarType::Float && sinks->is_contiguous() &&
                        sinks->numel() == query.size(1),
                    "sinks must be one contiguous float32 logit per query head");
    sink_logits = static_cast<const float*>(sinks->data_ptr());
  }
  const AttentionProblem problem = {
      query.data_ptr(), query.stride(0),  query.stride(1),
      out.data_ptr(),   out.stride(0),    out.stride(1),
      page_view(keys),  page_view(values), static_cast<const int32_t*>(block_table.data_ptr()),
      block_table.stride(0), keys.size(2), query.size(1) / keys.size(1),
      sink_logits,      static_cast<float>(scale), static_cast<float>(softcap),
      window,           chunk};
  if (query.size(0) == 0) {
    return;
  }
  check_batch(problem, batch, query.size(0), keys.size(0), block_table.size(1));
  run(problem, batch, kernels_for(isa), dtype_index(query));
}

}  // namespace ostinato
