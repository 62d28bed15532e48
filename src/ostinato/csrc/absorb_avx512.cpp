// Per-head products for x86-64 with AVX-512 but without bfloat16 instructions.
#if defined(__x86_64__)
#include "vector_avx512.h"

#include "absorb_kernel.h"

namespace ostinato {

AbsorbKernels avx512_absorb() { return {{absorb_head<FloatStep>, absorb_head<WidenedStep>}}; }

}  // namespace ostinato

#else

#include "absorb.h"

namespace ostinato {

AbsorbKernels avx512_absorb() { return {{nullptr, nullptr}}; }

}  // namespace ostinato

#endif
