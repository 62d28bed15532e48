// Operator absorb: one small matrix per head, applied to any number of rows, each row alike whatever its neighbours are.
#include "absorb.h"

#include <algorithm>

#include "operators.h"
#include "tasks.h"

namespace ostinato {
namespace {

AbsorbKernel absorb_kernel(int64_t isa, int dtype) {
  kernels_for(isa);  // refuses a level that this processor lacks
  switch (isa < 0 ? best_isa() : static_cast<Isa>(isa)) {
    case Isa::avx512_bf16:
      return avx512_bf16_absorb().run[dtype];
    case Isa::avx512:
      return avx512_absorb().run[dtype];
    case Isa::avx2:
      return avx2_absorb().run[dtype];
    default:
      return portable_absorb().run[dtype];
  }
}

void check_operands(const Tensor& x, const Tensor& w, const Tensor& out) {
  STD_TORCH_CHECK(x.dim() == 3 && out.dim() == 3, "x must be [rows, heads, inner] and out [rows, heads, columns]");
  STD_TORCH_CHECK(w.dim() == 4 && w.is_contiguous(), "w must be contiguous [heads, panels, steps, panel]");
  for (const Tensor* tensor : {&x, &w, &out}) {
    STD_TORCH_CHECK(tensor->is_cpu(), "absorb takes CPU tensors");
    STD_TORCH_CHECK(tensor->scalar_type() == x.scalar_type(), "x, w and out must share one dtype");
  }
  STD_TORCH_CHECK(has_dense_rows(x) && has_dense_rows(out), "the last dimension must be contiguous");
  STD_TORCH_CHECK(x.size(0) == out.size(0) && x.size(1) == out.size(1), "x and out differ in rows or heads");
  STD_TORCH_CHECK(w.size(0) == x.size(1), "w has ", w.size(0), " heads, x has ", x.size(1));
  const int64_t per_step = dtype_index(x) == 0 ? 1 : 2;
  STD_TORCH_CHECK(x.size(2) > 0 && w.size(2) == (x.size(2) + per_step - 1) / per_step, "x does not fit w");
  STD_TORCH_CHECK(w.size(1) == (out.size(2) + kPanelColumns - 1) / kPanelColumns && w.size(1) > 0 &&
                      w.size(3) == kPanelColumns * per_step,
                  "out does not fit w");
}

void absorb(const Tensor x, const Tensor w, Tensor out, int64_t isa) {
  check_operands(x, w, out);
  const AbsorbProblem problem = {x.data_ptr(),  x.stride(0),   x.stride(1), w.data_ptr(), out.data_ptr(),
                                 out.stride(0), out.stride(1), x.size(2),   out.size(2),  w.size(1)};
  const AbsorbKernel kernel = absorb_kernel(isa, dtype_index(x));
  const int64_t rows = x.size(0);
  const int64_t blocks = (rows + kAbsorbRows - 1) / kAbsorbRows;
  const int64_t cost = rows * x.size(1) * problem.inner * problem.columns;
  // Blocks of one head come one after another, so that its matrix is read from memory once.
  run_tasks(x.size(1) * blocks, cost, absorb_scratch_floats(problem.inner), [&](int64_t task, float* memory) {
    const int64_t first = task % blocks * kAbsorbRows;
    kernel(problem, {task / blocks, first, std::min(kAbsorbRows, rows - first), memory});
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(ostinato, library) {
  library.def("absorb(Tensor x, Tensor w, Tensor(a!) out, int isa=-1) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ostinato, CPU, library) { library.impl("absorb", TORCH_BOX(&absorb)); }

}  // namespace ostinato
