// Row-wise products for x86-64 with AVX-512 but without bfloat16 instructions.
#if defined(__x86_64__)
#include "vector_avx512.h"

#include "gemm_rows_kernel.h"

namespace ostinato {

const GemmTable* avx512_gemm() {
  static const GemmTable table = {{multiply<FloatOperand>, multiply<WidenedOperand>},
                                  {pack_panel<float>, pack_panel<uint16_t>},
                                  {combine<float>, combine<uint16_t>}};
  return &table;
}

}  // namespace ostinato

#else

#include "gemm_rows.h"

namespace ostinato {

const GemmTable* avx512_gemm() { return nullptr; }

}  // namespace ostinato

#endif
