// Scan kernels for x86-64 with AVX-512; there is no use here for its bfloat16 instructions.
#if defined(__x86_64__)
#include "vector_avx512.h"

#include "convolution_kernel.h"
#include "delta_kernel.h"
#include "selective_kernel.h"
#include "state_space_kernel.h"

namespace ostinato {

const ScanTable* avx512_scans() {
  static const ScanTable table = {scan_convolution, scan_delta, scan_state_space, scan_selective};
  return &table;
}

}  // namespace ostinato

#else

#include "scan_kernels.h"

namespace ostinato {

const ScanTable* avx512_scans() { return nullptr; }

}  // namespace ostinato

#endif
