// Per-head products for any processor.
#include "vector_portable.h"

#include "absorb_kernel.h"

namespace ostinato {

AbsorbKernels portable_absorb() { return {{absorb_head<FloatStep>, absorb_head<WidenedStep>}}; }

}  // namespace ostinato
