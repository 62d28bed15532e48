// Scan kernels for x86-64 with AVX2 and FMA.
#if defined(__x86_64__)
#include "vector_avx2.h"

#include "convolution_kernel.h"
#include "delta_kernel.h"
#include "selective_kernel.h"
#include "state_space_kernel.h"

namespace ostinato {

const ScanTable* avx2_scans() {
  static const ScanTable table = {scan_convolution, scan_delta, scan_state_space, scan_selective};
  return &table;
}

}  // namespace ostinato

#else

#include "scan_kernels.h"

namespace ostinato {

const ScanTable* avx2_scans() { return nullptr; }

}  // namespace ostinato

#endif
