// What the operators and the per-instruction-set kernels share. Plain C++, no torch headers: each kernel file stays
// quick to compile, and nothing that a kernel file instantiates can leak into code that runs on older processors.
#pragma once

#include <cstdint>

namespace ostinato {

// Keys per online-softmax step and keys per partition. Both grids are anchored at absolute position 0 of a sequence,
// never at the first key or query of a call: the order of every sum is then a function of positions alone, and the
// result does not depend on chunking, batch composition, page size or number of threads.
//
//   position  0        32       64                 512                1024
//             |  tile  |  tile  |  ...             |                  |
//             |          partition 0               |   partition 1    |   merged left to right
constexpr int64_t kTileKeys = 32;
constexpr int64_t kPartitionKeys = 512;

// Query rows (token, head of one KV head's group) that share one packed tile of keys and values.
constexpr int64_t kBlockRows = 64;

// Columns of accumulators are padded to this many floats, a multiple of two vectors of every instruction set.
constexpr int64_t kColumnPad = 32;

enum class Isa : int64_t { portable = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };

// One side (K or V) of the paged memory. Strides in elements; the last dimension is contiguous.
//
//   data -> block b:  + b * block_stride
//             head h: + h * head_stride       [num_blocks, kv_heads, block_size, dim], a view into a byte arena in
//             token t:+ t * token_stride      which other layers lie between two blocks
struct PageView {
  const void* data;
  int64_t block_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t dim;
};

// One call of paged attention, constant over all its tasks.
struct AttentionProblem {
  const void* query;  // [tokens, query_heads, keys.dim]
  int64_t query_token_stride;
  int64_t query_head_stride;
  void* out;  // [tokens, query_heads, values.dim]
  int64_t out_token_stride;
  int64_t out_head_stride;
  PageView keys;
  PageView values;
  const int32_t* block_table;
  int64_t table_stride;
  int64_t block_size;
  int64_t group_size;  // query heads per KV head
  const float* sinks;  // one logit per query head, or null
  float scale;
  float softcap;   // 0: none
  int64_t window;  // 0: none
  int64_t chunk;   // 0: none
};

// Up to kBlockRows rows of one sequence and KV head, over the partitions [part_begin, part_end).
// Row i of a sequence is query token i / group_size, head i % group_size of the group.
struct AttentionTask {
  int64_t sequence;
  int64_t kv_head;
  int64_t query_start;  // index of the sequence's first query token in the batch
  int64_t context;      // absolute position of that token
  int64_t first_row;
  int64_t rows;
  int64_t part_begin;
  int64_t part_end;
  float* partial;  // null: finish the rows and write them out; else the state of one partition is left here
  int64_t cost;
};

// State of the online softmax of `rows` rows: running maximum (base-2 logarithm), sum of weights, weighted values.
//
//   | maximum[kBlockRows] | sum[kBlockRows] | accumulator[rows][padded value dim] |
struct SoftmaxState {
  float* maximum;
  float* sum;
  float* accumulator;
};

inline int64_t padded_columns(int64_t dim) { return (dim + kColumnPad - 1) / kColumnPad * kColumnPad; }

inline int64_t state_floats(int64_t rows, int64_t value_dim) {
  return 2 * kBlockRows + rows * padded_columns(value_dim);
}

inline SoftmaxState state_at(float* memory) {
  return {memory, memory + kBlockRows, memory + 2 * kBlockRows};
}

// First key position that the query at `position` may see.
inline int64_t first_visible(const AttentionProblem& problem, int64_t position) {
  int64_t first = 0;
  if (problem.window > 0 && position - problem.window + 1 > first) {
    first = position - problem.window + 1;
  }
  if (problem.chunk > 0 && position / problem.chunk * problem.chunk > first) {
    first = position / problem.chunk * problem.chunk;
  }
  return first;
}

// The entry points of one instruction set; the index is 0 for float32 and 1 for bfloat16.
struct KernelTable {
  const char* name;
  int64_t (*scratch_floats)(const AttentionProblem&);
  // scratch: scratch_floats() floats, 64-byte aligned, private to the calling thread.
  void (*attend[2])(const AttentionProblem&, const AttentionTask&, float* scratch);
  // Folds `count` partition states, which lie one after another, in order, and writes the rows out.
  void (*merge[2])(const AttentionProblem&, const AttentionTask&, const float* states, int64_t count, float* scratch);
  int64_t (*argmax[2])(const void* row, int64_t columns);
};

const KernelTable* portable_kernels();
const KernelTable* avx2_kernels();         // null when this is not an x86-64 build
const KernelTable* avx512_kernels();       // idem
const KernelTable* avx512_bf16_kernels();  // idem

Isa best_isa();
// Throws std::runtime_error when this processor lacks it; a negative number stands for the best one.
const KernelTable& kernels_for(int64_t isa);

}  // namespace ostinato
