// The memory in which one thread works on one task. Included by a kernel file after its vector header.
#pragma once

#include "kernels.h"

namespace ostinato {
namespace {

struct Workspace {
  float* query;      // [kBlockRows][elements of D]
  float* keys;       // [elements of D][kTileKeys]
  float* values;     // [kTileKeys][padded columns of V]
  float* scores;     // [kRows][kTileKeys]
  float* weights;    // [kRows][kTileKeys]
  float* lane_sums;  // [kBlockRows][kLanes]: the sum of weights, one per lane until the end of a partition
  float* zeros;      // a row of K or V
  SoftmaxState part;
  SoftmaxState total;
};

// Cuts regions off a piece of memory; every region starts on a cache line.
struct Carver {
  float* memory;
  int64_t used;
};

inline float* take(Carver* carver, int64_t floats) {
  float* region = carver->memory == nullptr ? nullptr : carver->memory + carver->used;
  carver->used += (floats + 15) / 16 * 16;
  return region;
}

// Lays the workspace out in `memory`, or only measures it when that is null. Returns its size in floats.
inline int64_t lay_out(const AttentionProblem& problem, float* memory, Workspace* workspace) {
  const int64_t key_dim = problem.keys.dim;
  const int64_t value_dim = problem.values.dim;
  Carver carver = {memory, 0};
  workspace->query = take(&carver, kBlockRows * key_dim);
  workspace->keys = take(&carver, kTileKeys * key_dim);
  workspace->values = take(&carver, kTileKeys * padded_columns(value_dim));
  workspace->scores = take(&carver, Vector::kRows * kTileKeys);
  workspace->weights = take(&carver, Vector::kRows * kTileKeys);
  workspace->lane_sums = take(&carver, kBlockRows * Vector::kLanes);
  workspace->zeros = take(&carver, key_dim > value_dim ? key_dim : value_dim);
  float* part = take(&carver, state_floats(kBlockRows, value_dim));
  float* total = take(&carver, state_floats(kBlockRows, value_dim));
  if (memory != nullptr) {
    workspace->part = state_at(part);
    workspace->total = state_at(total);
  }
  return carver.used;
}

inline int64_t scratch_floats(const AttentionProblem& problem) {
  Workspace unused = {};
  return lay_out(problem, nullptr, &unused);
}

}  // namespace
}  // namespace ostinato
