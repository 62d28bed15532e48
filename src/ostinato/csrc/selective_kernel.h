// Mamba-1 over one block of channels, through the whole batch: `a` is laid out once. Included by a kernel file after
// scan_rows.h.
//
// Vectors lie along channels, so nothing is summed across lanes; state and `a` are transposed on the way in and out.
//
//   local state   [kScanChannels / kLanes][N][kLanes]     group of channels, n, channel
#pragma once

#include "scan_rows.h"

namespace ostinato {
namespace {

struct SelectiveRows {
  int64_t first;     // channel
  int64_t channels;  // at most kScanChannels
  int64_t states;    // N, padded
  float* a;
  float* state;
  float* inputs;   // [kScanRows][kScanChannels]
  float* dt;       // idem
  float* gate;     // idem
  float* out;      // idem
  float* b;        // [kScanRows][states]
  float* c;        // [kScanRows][states]
  float* skip;     // [kScanChannels]
  float* dt_bias;  // [kScanChannels]
};

OSTINATO_INLINE SelectiveRows selective_rows(const SelectiveProblem& problem, int64_t first_channel, float* memory) {
  const int64_t left = problem.channels - first_channel;
  ScanMemory region = {memory};
  SelectiveRows rows;
  rows.first = first_channel;
  rows.channels = left < kScanChannels ? left : kScanChannels;
  rows.states = padded(problem.state_dim, kScanPad);
  rows.a = cut(&region, rows.states * kScanChannels);
  rows.state = cut(&region, rows.states * kScanChannels);
  rows.inputs = cut(&region, kScanRows * kScanChannels);
  rows.dt = cut(&region, kScanRows * kScanChannels);
  rows.gate = cut(&region, kScanRows * kScanChannels);
  rows.out = cut(&region, kScanRows * kScanChannels);
  rows.b = cut(&region, kScanRows * rows.states);
  rows.c = cut(&region, kScanRows * rows.states);
  rows.skip = cut(&region, kScanChannels);
  rows.dt_bias = cut(&region, kScanChannels);
  load_parameter(problem.d, first_channel, rows.channels, kScanChannels, rows.skip);
  load_parameter(problem.dt_bias, first_channel, rows.channels, kScanChannels, rows.dt_bias);
  std::memset(rows.a, 0, static_cast<size_t>(rows.states * kScanChannels) * sizeof(float));
  for (int64_t i = 0; i < rows.channels; ++i) {
    float* to = rows.a + i / kLanes * kLanes * rows.states + i % kLanes;
    for (int64_t n = 0; n < problem.state_dim; ++n) {
      to[n * kLanes] = load_one(problem.a, (first_channel + i) * problem.a.row + n * problem.a.inner);
    }
  }
  return rows;
}

// kLanes channels times kLanes of N at a time; channels and n that do not exist are zeros.
OSTINATO_KERNEL void load_channels(const SelectiveProblem& problem, int64_t page, const SelectiveRows& rows) {
  if (page < 0) {
    std::memset(rows.state, 0, static_cast<size_t>(rows.states * kScanChannels) * sizeof(float));
    return;
  }
  const float* from = static_cast<const float*>(problem.states.data) + page * problem.states.page_stride +
                      rows.first * problem.state_dim;
  for (int64_t group = 0; group < rows.channels; group += kLanes) {
    for (int64_t n = 0; n < problem.state_dim; n += kLanes) {
      Vector::Reg block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        block[i] = Vector::zero();
        if (group + i < rows.channels) {
          const float* at = from + (group + i) * problem.state_dim + n;
          block[i] = load_raw(reinterpret_cast<const char*>(at), (problem.state_dim - n) * 4);
        }
      }
      Vector::transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        Vector::store(rows.state + group * rows.states + (n + i) * kLanes, block[i]);
      }
    }
  }
}

OSTINATO_KERNEL void store_channels(const SelectiveProblem& problem, int64_t page, const SelectiveRows& rows) {
  float* to = static_cast<float*>(problem.states.data) + page * problem.states.page_stride +
              rows.first * problem.state_dim;
  for (int64_t group = 0; group < rows.channels; group += kLanes) {
    for (int64_t n = 0; n < problem.state_dim; n += kLanes) {
      const int64_t left = problem.state_dim - n < kLanes ? problem.state_dim - n : kLanes;
      Vector::Reg block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        block[i] = Vector::load(rows.state + group * rows.states + (n + i) * kLanes);
      }
      Vector::transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        float line[kLanes];
        Vector::store(line, block[i]);
        if (group + i < rows.channels) {
          std::memcpy(to + (group + i) * problem.state_dim + n, line, static_cast<size_t>(left) * sizeof(float));
        }
      }
    }
  }
}

OSTINATO_KERNEL void prepare_selective(const SelectiveProblem& problem, const ScanBlock& block,
                                       const SelectiveRows& rows) {
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t row = block.first + r;
    float* dt = rows.dt + r * kScanChannels;
    load_row(problem.inputs, row * problem.inputs.row + rows.first, rows.channels, kScanChannels,
             rows.inputs + r * kScanChannels);
    load_row(problem.dt, row * problem.dt.row + rows.first, rows.channels, kScanChannels, dt);
    load_row(problem.b, row * problem.b.row, problem.state_dim, rows.states, rows.b + r * rows.states);
    load_row(problem.c, row * problem.c.row, problem.state_dim, rows.states, rows.c + r * rows.states);
    if (problem.gate.data != nullptr) {
      load_row(problem.gate, row * problem.gate.row + rows.first, rows.channels, kScanChannels,
               rows.gate + r * kScanChannels);
    }
    for (int64_t i = 0; i < kScanChannels; i += kLanes) {
      const Vector::Reg sum = Vector::add(Vector::load(dt + i), Vector::load(rows.dt_bias + i));
      Vector::store(dt + i, problem.softplus ? softplus_of(sum) : sum);
    }
  }
}

OSTINATO_KERNEL void selective_steps(const SelectiveProblem& problem, const SelectiveRows& rows, int64_t count) {
  for (int64_t group = 0; group < rows.channels; group += kLanes) {
    const float* a = rows.a + group * rows.states;
    float* state = rows.state + group * rows.states;
    const Vector::Reg skip = Vector::load(rows.skip + group);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = r * kScanChannels + group;
      const Vector::Reg inputs = Vector::load(rows.inputs + at);
      const Vector::Reg dt = Vector::load(rows.dt + at);
      const Vector::Reg weighted = Vector::multiply(dt, inputs);
      const float* b = rows.b + r * rows.states;
      const float* c = rows.c + r * rows.states;
      Vector::Reg sum = Vector::multiply(skip, inputs);
      for (int64_t n = 0; n < problem.state_dim; ++n) {
        const Vector::Reg decay = exp_of(Vector::multiply(dt, Vector::load(a + n * kLanes)));
        const Vector::Reg gain = Vector::multiply(weighted, Vector::broadcast(b[n]));
        const Vector::Reg next = Vector::multiply_add(decay, Vector::load(state + n * kLanes), gain);
        Vector::store(state + n * kLanes, next);
        sum = Vector::multiply_add(next, Vector::broadcast(c[n]), sum);
      }
      if (problem.gate.data != nullptr) {
        sum = Vector::multiply(sum, silu_of(Vector::load(rows.gate + at)));
      }
      Vector::store(rows.out + at, sum);
    }
  }
}

OSTINATO_KERNEL void scan_selective(const SelectiveProblem& problem, const ScanBatch& batch, int64_t first_channel,
                                    float* memory) {
  const SelectiveRows rows = selective_rows(problem, first_channel, memory);
  for (int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    ScanCursor cursor = scan_start(batch, sequence);
    ScanBlock block;
    load_channels(problem, batch.read[sequence], rows);
    while (next_block(batch, &cursor, &block)) {
      prepare_selective(problem, block, rows);
      selective_steps(problem, rows, block.rows);
      for (int64_t r = 0; r < block.rows; ++r) {
        store_row(rows.out + r * kScanChannels, rows.channels, problem.out,
                  (block.first + r) * problem.channels + rows.first);
      }
      if (block.page >= 0) {
        store_channels(problem, block.page, rows);
      }
    }
  }
}

}  // namespace
}  // namespace ostinato
