// What the scan operators and their kernels share. Plain C++, no torch headers, as in kernels.h.
//
// Every scan is sequential: one recurrence step per token, in one code path for any number of rows. Rows are prepared
// (converted, normalised, exponentiated) kScanRows at a time, which changes no bit: what is prepared for a row depends
// on that row alone, and vectors are always whole, filled up with zeros.
#pragma once

#include <cstdint>

namespace ostinato {

constexpr int64_t kScanRows = 32;      // rows prepared at a time
constexpr int64_t kScanChannels = 64;  // channels of one task of convolve and selective
constexpr int64_t kScanColumns = 32;   // columns of the gated delta state that are scanned together: [Dk][32] fits L1
constexpr int64_t kScanPad = 16;       // rows of floats are padded to this: a whole number of vectors everywhere

inline int64_t padded(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// float32 or bfloat16 [rows, heads, dim] with dim contiguous, or [rows, channels], [rows, heads] (`inner` is the stride
// of the second dimension), or a parameter. Strides in elements. Null data: the tensor was not given.
struct RowView {
  const void* data;
  int64_t dtype;  // 0: float32, 1: bfloat16
  int64_t row;
  int64_t inner;
};

struct OutView {
  void* data;
  int64_t dtype;
};

// States in their pages: dense but for the stride between pages, in elements.
struct StateView {
  void* data;
  int64_t page_stride;
};

// See StateIndex in runtime/scans/base.py.
struct ScanBatch {
  const int32_t* cu_q;
  const int32_t* read;
  const int32_t* cu_stops;
  const int32_t* stops;
  const int32_t* pages;
  int64_t sequences;
};

// Rows that are scanned in one go; `page` takes the state after the last of them, below 0: none does.
struct ScanBlock {
  int64_t first;
  int64_t rows;
  int64_t page;
};

struct ScanCursor {
  int64_t row;
  int64_t end;
  int64_t stop;
};

inline ScanCursor scan_start(const ScanBatch& batch, int64_t sequence) {
  return {batch.cu_q[sequence], batch.cu_q[sequence + 1], batch.cu_stops[sequence]};
}

// The next block of a sequence: it ends at the next stop at the latest.
inline bool next_block(const ScanBatch& batch, ScanCursor* cursor, ScanBlock* block) {
  if (cursor->row >= cursor->end) {
    return false;
  }
  const int64_t stop = batch.stops[cursor->stop];
  const int64_t end = cursor->row + kScanRows < stop ? cursor->row + kScanRows : stop;
  *block = {cursor->row, end - cursor->row, end == stop ? batch.pages[cursor->stop] : -1};
  cursor->row = end;
  cursor->stop += end == stop ? 1 : 0;
  return true;
}

struct ConvolutionProblem {
  RowView inputs;
  RowView weight;  // [channels, kernel]
  RowView bias;    // [channels] (`row` is its stride)
  OutView out;
  StateView states;  // [channels, kernel - 1] in the dtype of inputs
  int64_t channels;
  int64_t kernel;
  bool silu;
};

struct DeltaProblem {
  RowView query;
  RowView key;
  RowView value;
  RowView decay;  // [rows, heads] or, with decay_per_key, [rows, heads, key_dim]
  RowView beta;
  OutView out;
  StateView states;  // [heads, key_dim, value_dim]
  int64_t heads;
  int64_t heads_per_key;
  int64_t key_dim;
  int64_t value_dim;
  bool decay_per_key;
  bool normalize;
};

struct StateSpaceProblem {
  RowView inputs;
  RowView dt;
  RowView a;
  RowView b;
  RowView c;
  RowView d;
  RowView dt_bias;
  OutView out;
  StateView states;  // [heads, head_dim, state_dim]
  int64_t heads;
  int64_t heads_per_group;
  int64_t head_dim;
  int64_t state_dim;
  float dt_min;
  float dt_max;
  bool softplus;
};

struct SelectiveProblem {
  RowView inputs;
  RowView dt;
  RowView a;  // [channels, state_dim]
  RowView b;
  RowView c;
  RowView d;
  RowView gate;
  RowView dt_bias;
  OutView out;
  StateView states;  // [channels, state_dim]
  int64_t channels;
  int64_t state_dim;
  bool softplus;
};

// Floats of memory that one task needs.
inline int64_t convolution_floats(const ConvolutionProblem& problem) {
  return (2 * problem.kernel + 1 + kScanRows) * kScanChannels;
}

inline int64_t delta_floats(const DeltaProblem& problem) {
  const int64_t keys = padded(problem.key_dim, kScanPad);
  const int64_t values = padded(problem.value_dim, kScanColumns);
  return keys * values + kScanRows * (4 * keys + 2 * values + 2);
}

inline int64_t state_space_floats(const StateSpaceProblem& problem) {
  const int64_t rows = padded(problem.head_dim, kScanPad);
  const int64_t columns = padded(problem.state_dim, kScanPad);
  return rows * columns + kScanRows * (3 * rows + 2 * columns + 2);
}

inline int64_t selective_floats(const SelectiveProblem& problem) {
  const int64_t states = padded(problem.state_dim, kScanPad);
  return 2 * states * kScanChannels + kScanRows * (4 * kScanChannels + 2 * states) + 2 * kScanChannels;
}

// The entry points of one instruction set. A task is a (sequence, head) of its own state, or a block of channels
// through the whole batch. memory: as above, 64-byte aligned, private to the calling thread.
struct ScanTable {
  void (*convolve)(const ConvolutionProblem&, const ScanBatch&, int64_t first_channel, float* memory);
  void (*delta)(const DeltaProblem&, const ScanBatch&, int64_t sequence, int64_t head, float* memory);
  void (*state_space)(const StateSpaceProblem&, const ScanBatch&, int64_t sequence, int64_t head, float* memory);
  void (*selective)(const SelectiveProblem&, const ScanBatch&, int64_t first_channel, float* memory);
};

const ScanTable* portable_scans();
const ScanTable* avx2_scans();    // null when this is not an x86-64 build
const ScanTable* avx512_scans();  // idem

}  // namespace ostinato
