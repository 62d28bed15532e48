// Row-wise products for x86-64 with AVX2 and FMA.
#if defined(__x86_64__)
#include "vector_avx2.h"

#include "gemm_rows_kernel.h"

namespace ostinato {

const GemmTable* avx2_gemm() {
  static const GemmTable table = {{multiply<FloatOperand>, multiply<WidenedOperand>},
                                  {pack_panel<float>, pack_panel<uint16_t>},
                                  {combine<float>, combine<uint16_t>}};
  return &table;
}

}  // namespace ostinato

#else

#include "gemm_rows.h"

namespace ostinato {

const GemmTable* avx2_gemm() { return nullptr; }

}  // namespace ostinato

#endif
