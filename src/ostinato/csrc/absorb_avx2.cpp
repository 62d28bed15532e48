// Per-head products for x86-64 with AVX2 and FMA.
#if defined(__x86_64__)
#include "vector_avx2.h"

#include "absorb_kernel.h"

namespace ostinato {

AbsorbKernels avx2_absorb() { return {{absorb_head<FloatStep>, absorb_head<WidenedStep>}}; }

}  // namespace ostinato

#else

#include "absorb.h"

namespace ostinato {

AbsorbKernels avx2_absorb() { return {{nullptr, nullptr}}; }

}  // namespace ostinato

#endif
