// Scan kernels for any processor.
#include "vector_portable.h"

#include "convolution_kernel.h"
#include "delta_kernel.h"
#include "selective_kernel.h"
#include "state_space_kernel.h"

namespace ostinato {

const ScanTable* portable_scans() {
  static const ScanTable table = {scan_convolution, scan_delta, scan_state_space, scan_selective};
  return &table;
}

}  // namespace ostinato
