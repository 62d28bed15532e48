// A causal depthwise convolution over one block of channels, through the whole batch: the weights are laid out once.
// Included by a kernel file after scan_rows.h.
//
//   window   [kernel - 1 + kScanRows][kScanChannels]    the inputs before a block of rows, then its own
#pragma once

#include "scan_rows.h"

namespace ostinato {
namespace {

// The state is [channels, taps]; the window wants [taps][channels]. All taps of one channel lie together.
template <class Source>
OSTINATO_INLINE void load_taps(const Source* from, int64_t channels, int64_t taps, float* window) {
  for (int64_t channel = 0; channel < channels; ++channel) {
    for (int64_t tap = 0; tap < taps; ++tap) {
      window[tap * kScanChannels + channel] = widen(from[channel * taps + tap]);
    }
  }
}

template <class Source>
OSTINATO_INLINE void store_taps(const float* window, int64_t channels, int64_t taps, Source* to) {
  for (int64_t channel = 0; channel < channels; ++channel) {
    for (int64_t tap = 0; tap < taps; ++tap) {
      narrow_to(window[tap * kScanChannels + channel], to + channel * taps + tap);
    }
  }
}

struct ConvolutionRows {
  int64_t first;     // channel
  int64_t channels;  // at most kScanChannels
  float* weight;     // [kernel][kScanChannels]
  float* bias;       // [kScanChannels]
  float* window;
  float* out;  // [kScanChannels]
};

OSTINATO_KERNEL void load_window(const ConvolutionProblem& problem, int64_t page, const ConvolutionRows& rows) {
  const int64_t taps = problem.kernel - 1;
  std::memset(rows.window, 0, static_cast<size_t>(taps * kScanChannels) * sizeof(float));
  if (page < 0) {
    return;
  }
  const int64_t offset = page * problem.states.page_stride + rows.first * taps;
  if (problem.inputs.dtype == 0) {
    load_taps(static_cast<const float*>(problem.states.data) + offset, rows.channels, taps, rows.window);
  } else {
    load_taps(static_cast<const uint16_t*>(problem.states.data) + offset, rows.channels, taps, rows.window);
  }
}

OSTINATO_KERNEL void store_window(const ConvolutionProblem& problem, int64_t page, const ConvolutionRows& rows) {
  const int64_t taps = problem.kernel - 1;
  const int64_t offset = page * problem.states.page_stride + rows.first * taps;
  if (problem.inputs.dtype == 0) {
    store_taps(rows.window, rows.channels, taps, static_cast<float*>(problem.states.data) + offset);
  } else {
    store_taps(rows.window, rows.channels, taps, static_cast<uint16_t*>(problem.states.data) + offset);
  }
}

OSTINATO_KERNEL void convolve_row(const ConvolutionProblem& problem, const ConvolutionRows& rows, const float* window) {
  for (int64_t channel = 0; channel < kScanChannels; channel += kLanes) {
    Vector::Reg sum = Vector::load(rows.bias + channel);
    for (int64_t tap = 0; tap < problem.kernel; ++tap) {
      const int64_t at = tap * kScanChannels + channel;
      sum = Vector::multiply_add(Vector::load(rows.weight + at), Vector::load(window + at), sum);
    }
    Vector::store(rows.out + channel, problem.silu ? silu_of(sum) : sum);
  }
}

OSTINATO_KERNEL void convolve_block(const ConvolutionProblem& problem, const ScanBlock& block,
                                    const ConvolutionRows& rows) {
  const int64_t taps = problem.kernel - 1;
  for (int64_t r = 0; r < block.rows; ++r) {
    const int64_t row = block.first + r;
    load_row(problem.inputs, row * problem.inputs.row + rows.first, rows.channels, kScanChannels,
             rows.window + (taps + r) * kScanChannels);
    convolve_row(problem, rows, rows.window + r * kScanChannels);
    store_row(rows.out, rows.channels, problem.out, row * problem.channels + rows.first);
  }
  std::memmove(rows.window, rows.window + block.rows * kScanChannels,
               static_cast<size_t>(taps * kScanChannels) * sizeof(float));
}

OSTINATO_KERNEL void scan_convolution(const ConvolutionProblem& problem, const ScanBatch& batch, int64_t first_channel,
                                      float* memory) {
  const int64_t left = problem.channels - first_channel;
  ScanMemory region = {memory};
  ConvolutionRows rows;
  rows.first = first_channel;
  rows.channels = left < kScanChannels ? left : kScanChannels;
  rows.weight = cut(&region, problem.kernel * kScanChannels);
  rows.bias = cut(&region, kScanChannels);
  rows.window = cut(&region, (problem.kernel - 1 + kScanRows) * kScanChannels);
  rows.out = cut(&region, kScanChannels);
  load_parameter(problem.bias, first_channel, rows.channels, kScanChannels, rows.bias);
  for (int64_t tap = 0; tap < problem.kernel; ++tap) {
    for (int64_t i = 0; i < kScanChannels; ++i) {
      const int64_t offset = (first_channel + i) * problem.weight.row + tap * problem.weight.inner;
      rows.weight[tap * kScanChannels + i] = i < rows.channels ? load_one(problem.weight, offset) : 0.0f;
    }
  }
  for (int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    ScanCursor cursor = scan_start(batch, sequence);
    ScanBlock block;
    load_window(problem, batch.read[sequence], rows);
    while (next_block(batch, &cursor, &block)) {
      convolve_block(problem, block, rows);
      if (block.page >= 0) {
        store_window(problem, block.page, rows);
      }
    }
  }
}

}  // namespace
}  // namespace ostinato
