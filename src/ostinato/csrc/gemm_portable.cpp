// Row-wise products for any processor.
#include "vector_portable.h"

#include "gemm_rows_kernel.h"

namespace ostinato {

const GemmTable* portable_gemm() {
  static const GemmTable table = {{multiply<FloatOperand>, multiply<WidenedOperand>},
                                  {pack_panel<float>, pack_panel<uint16_t>},
                                  {combine<float>, combine<uint16_t>}};
  return &table;
}

}  // namespace ostinato
