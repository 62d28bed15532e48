// Kernels for any processor.
#include "vector_portable.h"

#include "argmax_kernel.h"
#include "attention_kernel.h"

namespace ostinato {

const KernelTable* portable_kernels() {
  static const KernelTable table = {"portable",
                                    scratch_floats,
                                    {attend<FloatFormat>, attend<WidenedFormat>},
                                    {merge<float>, merge<uint16_t>},
                                    {argmax<float>, argmax<uint16_t>}};
  return &table;
}

}  // namespace ostinato
