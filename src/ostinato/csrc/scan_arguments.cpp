// The check of a state index, and the choice of an instruction set for scans.
#include "scan_arguments.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace ostinato {
namespace {

const int32_t* int32_vector(const Tensor& tensor, int64_t size, const char* name) {
  check_int32(tensor, 1, name);
  STD_TORCH_CHECK(tensor.size(0) == size, name, " must have ", size, " entries, not ", tensor.size(0));
  return static_cast<const int32_t*>(tensor.data_ptr());
}

void check_offsets(const int32_t* offsets, int64_t sequences, int64_t total, const char* name) {
  STD_TORCH_CHECK(offsets[0] == 0 && offsets[sequences] == total, name, " must run from 0 to ", total);
  for (int64_t i = 0; i < sequences; ++i) {
    STD_TORCH_CHECK(offsets[i] <= offsets[i + 1], name, " must not fall");
  }
}

void check_stops(const ScanBatch& batch, int64_t sequence) {
  const int32_t end = batch.cu_q[sequence + 1];
  int32_t before = batch.cu_q[sequence];
  for (int32_t stop = batch.cu_stops[sequence]; stop < batch.cu_stops[sequence + 1]; ++stop) {
    STD_TORCH_CHECK(batch.stops[stop] > before && batch.stops[stop] <= end, "stop ", stop, " of sequence ", sequence,
                    " is after row ", batch.stops[stop], ", which does not ascend inside the sequence");
    before = batch.stops[stop];
  }
  STD_TORCH_CHECK(before == end, "sequence ", sequence, " keeps no state after its last row");
}

// Sorted (page, sequence) pairs of writes: a page is written once, and read by no other sequence.
void check_owners(const ScanBatch& batch, int64_t stop_count) {
  std::vector<std::pair<int32_t, int64_t>> writes;
  writes.reserve(static_cast<size_t>(stop_count));
  for (int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    for (int32_t stop = batch.cu_stops[sequence]; stop < batch.cu_stops[sequence + 1]; ++stop) {
      writes.emplace_back(batch.pages[stop], sequence);
    }
  }
  std::sort(writes.begin(), writes.end());
  for (size_t i = 1; i < writes.size(); ++i) {
    STD_TORCH_CHECK(writes[i].first != writes[i - 1].first, "page ", writes[i].first, " is written twice");
  }
  for (int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    const int32_t page = batch.read[sequence];
    const auto found = std::lower_bound(writes.begin(), writes.end(), std::make_pair(page, int64_t{0}));
    STD_TORCH_CHECK(found == writes.end() || found->first != page || found->second == sequence, "sequence ", sequence,
                    " reads page ", page, ", which another one writes");
  }
}

}  // namespace

ScanBatch checked_batch(const IndexTensors& index, int64_t rows, int64_t page_count) {
  check_int32(index.read, 1, "read");
  check_int32(index.stops, 1, "stops");
  const int64_t sequences = index.read.size(0);
  const int64_t stop_count = index.stops.size(0);
  const ScanBatch batch = {int32_vector(index.cu_q, sequences + 1, "cu_q"),
                           int32_vector(index.read, sequences, "read"),
                           int32_vector(index.cu_stops, sequences + 1, "cu_stops"),
                           int32_vector(index.stops, stop_count, "stops"),
                           int32_vector(index.pages, stop_count, "pages"),
                           sequences};
  check_offsets(batch.cu_q, sequences, rows, "cu_q");
  check_offsets(batch.cu_stops, sequences, stop_count, "cu_stops");
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    STD_TORCH_CHECK(batch.read[sequence] < page_count, "sequence ", sequence, " reads page ", batch.read[sequence],
                    " of a pool of ", page_count);
    check_stops(batch, sequence);
  }
  for (int64_t stop = 0; stop < stop_count; ++stop) {
    STD_TORCH_CHECK(batch.pages[stop] >= 0 && batch.pages[stop] < page_count, "stop ", stop, " writes page ",
                    batch.pages[stop], " of a pool of ", page_count);
  }
  check_owners(batch, stop_count);
  return batch;
}

const ScanTable& scans_for(int64_t isa) {
  const KernelTable* chosen = &kernels_for(isa);  // refuses what this processor lacks
  if (chosen == portable_kernels()) {
    return *portable_scans();
  }
  return chosen == avx2_kernels() ? *avx2_scans() : *avx512_scans();
}

}  // namespace ostinato
