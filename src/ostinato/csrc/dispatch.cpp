// Chooses the instruction set at run time.
#include "kernels.h"

#include <stdexcept>
#include <string>

namespace ostinato {

Isa best_isa() {
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) {
    return Isa::avx512_bf16;
  }
  if (avx512) {
    return Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return Isa::avx2;
  }
#endif
  return Isa::portable;
}

const KernelTable& kernels_for(int64_t isa) {
  static const Isa best = best_isa();
  const int64_t wanted = isa < 0 ? static_cast<int64_t>(best) : isa;
  if (wanted > static_cast<int64_t>(best)) {
    throw std::runtime_error("ostinato: this processor lacks instruction set level " + std::to_string(wanted));
  }
  switch (static_cast<Isa>(wanted)) {
    case Isa::avx512_bf16:
      return *avx512_bf16_kernels();
    case Isa::avx512:
      return *avx512_kernels();
    case Isa::avx2:
      return *avx2_kernels();
    default:
      return *portable_kernels();
  }
}

}  // namespace ostinato
