// Kernels for x86-64 with AVX-512 but without bfloat16 instructions.
#if defined(__x86_64__)
#include "vector_avx512.h"

#include "argmax_kernel.h"
#include "attention_kernel.h"

namespace ostinato {

const KernelTable* avx512_kernels() {
  static const KernelTable table = {"avx512",
                                    scratch_floats,
                                    {attend<FloatFormat>, attend<WidenedFormat>},
                                    {merge<float>, merge<uint16_t>},
                                    {argmax<float>, argmax<uint16_t>}};
  return &table;
}

}  // namespace ostinato

#else

#include "kernels.h"

namespace ostinato {

const KernelTable* avx512_kernels() { return nullptr; }

}  // namespace ostinato

#endif
