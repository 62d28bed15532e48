// Per-head products for x86-64 with AVX-512 and its bfloat16 instructions.
#if defined(__x86_64__)
#define OSTINATO_AVX512_BF16
#include "vector_avx512.h"

#include "absorb_kernel.h"

namespace ostinato {

AbsorbKernels avx512_bf16_absorb() { return {{absorb_head<FloatStep>, absorb_head<PairStep>}}; }

}  // namespace ostinato

#else

#include "absorb.h"

namespace ostinato {

AbsorbKernels avx512_bf16_absorb() { return {{nullptr, nullptr}}; }

}  // namespace ostinato

#endif
