// The scan operators: they check their arguments, cut the batch into tasks and run them on torch's thread pool. No task
// is a part of a sequence's rows, and tasks cannot fail.
#include "scan_arguments.h"
#include "tasks.h"

namespace ostinato {
namespace {

int64_t channel_blocks(int64_t channels) { return (channels + kScanChannels - 1) / kScanChannels; }

void scan_convolve(const Tensor inputs, const Tensor weight, std::optional<Tensor> bias, bool silu, Tensor states,
                   const Tensor cu_q, const Tensor read, const Tensor cu_stops, const Tensor stops, const Tensor pages,
                   Tensor out, int64_t isa) {
  STD_TORCH_CHECK(inputs.dim() == 2 && weight.dim() == 2 && weight.size(1) >= 1,
                  "inputs must be [rows, channels], weight [channels, kernel]");
  const int64_t rows = inputs.size(0);
  const int64_t channels = inputs.size(1);
  const int64_t kernel = weight.size(1);
  STD_TORCH_CHECK(out.scalar_type() == inputs.scalar_type(), "out must have the dtype of inputs");
  const ConvolutionProblem problem = {row_view(inputs, {rows, channels}, "inputs"),
                                      scalar_view(weight, {channels, kernel}, "weight"),
                                      optional_view(bias, channels, "bias"),
                                      out_view(out, {rows, channels}, "out"),
                                      state_view(states, {channels, kernel - 1}, inputs.scalar_type()),
                                      channels,
                                      kernel,
                                      silu};
  const ScanBatch batch = checked_batch({cu_q, read, cu_stops, stops, pages}, rows, states.size(0));
  const ScanTable& kernels = scans_for(isa);
  run_tasks(channel_blocks(channels), rows * channels * (kernel + 16), convolution_floats(problem),
            [&](int64_t task, float* memory) { kernels.convolve(problem, batch, task * kScanChannels, memory); });
}

void scan_gated_delta(const Tensor query, const Tensor key, const Tensor value, const Tensor decay, const Tensor beta,
                      bool normalize, Tensor states, const Tensor cu_q, const Tensor read, const Tensor cu_stops,
                      const Tensor stops, const Tensor pages, Tensor out, int64_t isa) {
  STD_TORCH_CHECK(key.dim() == 3 && value.dim() == 3 && key.size(1) > 0 && value.size(1) % key.size(1) == 0,
                  "key must be [rows, key heads, Dk], value [rows, heads, Dv], heads a multiple of key heads");
  STD_TORCH_CHECK(decay.dim() == 2 || decay.dim() == 3, "decay must be [rows, heads] or [rows, heads, Dk]");
  const int64_t rows = value.size(0);
  const int64_t key_heads = key.size(1);
  const int64_t key_dim = key.size(2);
  const int64_t heads = value.size(1);
  const int64_t value_dim = value.size(2);
  STD_TORCH_CHECK(key_dim > 0 && value_dim > 0, "head dimensions must be positive");
  const bool decay_per_key = decay.dim() == 3;
  const DeltaProblem problem = {row_view(query, {rows, key_heads, key_dim}, "query"),
                                row_view(key, {rows, key_heads, key_dim}, "key"),
                                row_view(value, {rows, heads, value_dim}, "value"),
                                decay_per_key ? row_view(decay, {rows, heads, key_dim}, "decay")
                                              : scalar_view(decay, {rows, heads}, "decay"),
                                scalar_view(beta, {rows, heads}, "beta"),
                                out_view(out, {rows, heads, value_dim}, "out"),
                                state_view(states, {heads, key_dim, value_dim}, ScalarType::Float),
                                heads,
                                heads / key_heads,
                                key_dim,
                                value_dim,
                                decay_per_key,
                                normalize};
  const ScanBatch batch = checked_batch({cu_q, read, cu_stops, stops, pages}, rows, states.size(0));
  const ScanTable& kernels = scans_for(isa);
  run_tasks(batch.sequences * heads, 4 * rows * heads * key_dim * value_dim, delta_floats(problem),
            [&](int64_t task, float* memory) { kernels.delta(problem, batch, task / heads, task % heads, memory); });
}

void scan_state_space(const Tensor inputs, const Tensor dt, const Tensor a, const Tensor b, const Tensor c,
                      std::optional<Tensor> d, std::optional<Tensor> dt_bias, bool softplus, double dt_min,
                      double dt_max, Tensor states, const Tensor cu_q, const Tensor read, const Tensor cu_stops,
                      const Tensor stops, const Tensor pages, Tensor out, int64_t isa) {
  STD_TORCH_CHECK(inputs.dim() == 3 && b.dim() == 3 && b.size(1) > 0 && inputs.size(1) % b.size(1) == 0,
                  "inputs must be [rows, heads, P], b and c [rows, groups, N], heads a multiple of groups");
  const int64_t rows = inputs.size(0);
  const int64_t heads = inputs.size(1);
  const int64_t head_dim = inputs.size(2);
  const int64_t groups = b.size(1);
  const int64_t state_dim = b.size(2);
  STD_TORCH_CHECK(head_dim > 0 && state_dim > 0, "head and state dimensions must be positive");
  const StateSpaceProblem problem = {row_view(inputs, {rows, heads, head_dim}, "inputs"),
                                     scalar_view(dt, {rows, heads}, "dt"),
                                     scalar_view(a, {heads}, "a"),
                                     row_view(b, {rows, groups, state_dim}, "b"),
                                     row_view(c, {rows, groups, state_dim}, "c"),
                                     optional_view(d, heads, "d"),
                                     optional_view(dt_bias, heads, "dt_bias"),
                                     out_view(out, {rows, heads, head_dim}, "out"),
                                     state_view(states, {heads, head_dim, state_dim}, ScalarType::Float),
                                     heads,
                                     heads / groups,
                                     head_dim,
                                     state_dim,
                                     static_cast<float>(dt_min),
                                     static_cast<float>(dt_max),
                                     softplus};
  const ScanBatch batch = checked_batch({cu_q, read, cu_stops, stops, pages}, rows, states.size(0));
  const ScanTable& kernels = scans_for(isa);
  run_tasks(
      batch.sequences * heads, 3 * rows * heads * head_dim * state_dim, state_space_floats(problem),
      [&](int64_t task, float* memory) { kernels.state_space(problem, batch, task / heads, task % heads, memory); });
}

void scan_selective(const Tensor inputs, const Tensor dt, const Tensor a, const Tensor b, const Tensor c,
                    std::optional<Tensor> d, std::optional<Tensor> gate, std::optional<Tensor> dt_bias, bool softplus,
                    Tensor states, const Tensor cu_q, const Tensor read, const Tensor cu_stops, const Tensor stops,
                    const Tensor pages, Tensor out, int64_t isa) {
  STD_TORCH_CHECK(inputs.dim() == 2 && a.dim() == 2 && a.size(1) > 0,
                  "inputs must be [rows, channels], a [channels, N]");
  const int64_t rows = inputs.size(0);
  const int64_t channels = inputs.size(1);
  const int64_t state_dim = a.size(1);
  const SelectiveProblem problem = {row_view(inputs, {rows, channels}, "inputs"),
                                    row_view(dt, {rows, channels}, "dt"),
                                    scalar_view(a, {channels, state_dim}, "a"),
                                    row_view(b, {rows, state_dim}, "b"),
                                    row_view(c, {rows, state_dim}, "c"),
                                    optional_view(d, channels, "d"),
                                    gate.has_value() ? row_view(*gate, {rows, channels}, "gate") : RowView{},
                                    optional_view(dt_bias, channels, "dt_bias"),
                                    out_view(out, {rows, channels}, "out"),
                                    state_view(states, {channels, state_dim}, ScalarType::Float),
                                    channels,
                                    state_dim,
                                    softplus};
  const ScanBatch batch = checked_batch({cu_q, read, cu_stops, stops, pages}, rows, states.size(0));
  const ScanTable& kernels = scans_for(isa);
  run_tasks(channel_blocks(channels), 16 * rows * channels * state_dim, selective_floats(problem),
            [&](int64_t task, float* memory) { kernels.selective(problem, batch, task * kScanChannels, memory); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ostinato, library) {
  library.def(
      "scan_convolve(Tensor inputs, Tensor weight, Tensor? bias, bool silu, Tensor(a!) states, Tensor cu_q, "
      "Tensor read, Tensor cu_stops, Tensor stops, Tensor pages, Tensor(b!) out, int isa=-1) -> ()");
  library.def(
      "scan_gated_delta(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, bool normalize, "
      "Tensor(a!) states, Tensor cu_q, Tensor read, Tensor cu_stops, Tensor stops, Tensor pages, Tensor(b!) out, "
      "int isa=-1) -> ()");
  library.def(
      "scan_state_space(Tensor inputs, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, "
      "bool softplus, float dt_min, float dt_max, Tensor(a!) states, Tensor cu_q, Tensor read, Tensor cu_stops, "
      "Tensor stops, Tensor pages, Tensor(b!) out, int isa=-1) -> ()");
  library.def(
      "scan_selective(Tensor inputs, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? gate, "
      "Tensor? dt_bias, bool softplus, Tensor(a!) states, Tensor cu_q, Tensor read, Tensor cu_stops, Tensor stops, "
      "Tensor pages, Tensor(b!) out, int isa=-1) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ostinato, CPU, library) {
  library.impl("scan_convolve", TORCH_BOX(&scan_convolve));
  library.impl("scan_gated_delta", TORCH_BOX(&scan_gated_delta));
  library.impl("scan_state_space", TORCH_BOX(&scan_state_space));
  library.impl("scan_selective", TORCH_BOX(&scan_selective));
}

}  // namespace ostinato
