// How rows of K, V and Q become the operands of one tile product. Included by a kernel file after its vector header.
//
// Both products of attention, Q K^T and P V, are the same small matrix product over 32-bit *elements*: an element is
// one float (FloatFormat, WidenedFormat) or a pair of bfloat16 (PairFormat).
//
//   keys    [elements of D][32 keys]        transposed: lane = key, so that no sum runs across lanes
//   values  [32 keys or 16 pairs][columns]  lane = column of V; PairFormat interleaves keys 2i and 2i + 1
#pragma once

#include "kernels.h"

namespace ostinato {
namespace {

constexpr int kLanes = Vector::kLanes;

OSTINATO_INLINE Vector::Reg load_source(const float* from) { return Vector::load(from); }
OSTINATO_INLINE Vector::Reg load_source(const uint16_t* from) { return Vector::load_bf16(from); }

OSTINATO_INLINE float widen(float value) { return value; }
OSTINATO_INLINE float widen(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

OSTINATO_INLINE void narrow_to(float value, float* to) { *to = value; }
OSTINATO_INLINE void narrow_to(float value, uint16_t* to) {  // round to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  *to = static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

// One vector of raw bytes; reads nothing beyond `bytes` and fills up with zeros.
OSTINATO_INLINE Vector::Reg load_raw(const char* from, int64_t bytes) {
  constexpr int64_t kVectorBytes = kLanes * 4;
  if (bytes >= kVectorBytes) {
    return Vector::load(reinterpret_cast<const float*>(from));
  }
  float whole[kLanes] = {};
  std::memcpy(whole, from, static_cast<size_t>(bytes));
  return Vector::load(whole);
}

struct FloatFormat {
  typedef float Source;
  static constexpr int64_t kKeysPerStep = 1;
  static constexpr int64_t kElementsPerWord = 1;
  OSTINATO_INLINE int64_t elements(int64_t dim) { return dim; }
  OSTINATO_INLINE Vector::Reg dot(Vector::Reg a, Vector::Reg b, Vector::Reg c) {
    return Vector::multiply_add(a, b, c);
  }
  OSTINATO_INLINE void load_query(const float* from, int64_t dim, float* to) {
    std::memcpy(to, from, static_cast<size_t>(dim) * sizeof(float));
  }
  OSTINATO_INLINE void store_key_word(Vector::Reg word, float* to, int64_t) { Vector::store(to, word); }
  OSTINATO_INLINE void store_weights(Vector::Reg first, Vector::Reg second, float* to) {
    Vector::store(to, first);
    Vector::store(to + kLanes, second);
  }
};

// bfloat16 without a bfloat16 unit: everything is widened to float while packing.
struct WidenedFormat : FloatFormat {
  typedef uint16_t Source;
  static constexpr int64_t kElementsPerWord = 2;
  OSTINATO_INLINE void load_query(const uint16_t* from, int64_t dim, float* to) {
    for (int64_t i = 0; i < dim; ++i) {
      to[i] = widen(from[i]);
    }
  }
  // `elements_left` is 1 for the last word of an odd row.
  OSTINATO_INLINE void store_key_word(Vector::Reg word, float* to, int64_t elements_left) {
    Vector::store(to, Vector::low_half(word));
    if (elements_left > 1) {
      Vector::store(to + kTileKeys, Vector::high_half(word));
    }
  }
};

#if defined(OSTINATO_AVX512_BF16)
struct PairFormat {
  typedef uint16_t Source;
  static constexpr int64_t kKeysPerStep = 2;
  static constexpr int64_t kElementsPerWord = 1;
  OSTINATO_INLINE int64_t elements(int64_t dim) { return (dim + 1) / 2; }
  OSTINATO_INLINE Vector::Reg dot(Vector::Reg a, Vector::Reg b, Vector::Reg c) { return Vector::pair_dot(a, b, c); }
  OSTINATO_INLINE void load_query(const uint16_t* from, int64_t dim, float* to) {
    to[elements(dim) - 1] = 0.0f;  // the unused half of an odd row
    std::memcpy(to, from, static_cast<size_t>(dim) * sizeof(uint16_t));
  }
  OSTINATO_INLINE void store_key_word(Vector::Reg word, float* to, int64_t) { Vector::store(to, word); }
  OSTINATO_INLINE void store_weights(Vector::Reg first, Vector::Reg second, float* to) {
    Vector::store(to, Vector::narrow(first, second));
  }
};
#endif

// The 32 rows of a tile; rows that no query of the task may see point at zeros.
struct TileRows {
  const char* keys[kTileKeys];
  const char* values[kTileKeys];
};

template <class Format>
OSTINATO_KERNEL void pack_keys(const TileRows& tile, const TileRows& next, int64_t dim, float* packed) {
  const int64_t bytes = dim * static_cast<int64_t>(sizeof(typename Format::Source));
  const int64_t words = (bytes + 3) / 4;
  const int64_t elements = Format::elements(dim);
  for (int64_t word = 0; word < words; word += kLanes) {
    const int64_t used = words - word < kLanes ? words - word : kLanes;
    for (int64_t key = 0; key < kTileKeys; key += kLanes) {
      Vector::Reg block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        block[i] = load_raw(tile.keys[key + i] + word * 4, bytes - word * 4);
        Vector::prefetch(next.keys[key + i] + word * 4);
      }
      Vector::transpose(block);
      for (int i = 0; i < kLanes; ++i) {  // a fixed count keeps the block in registers
        if (i < used) {
          const int64_t element = (word + i) * Format::kElementsPerWord;
          Format::store_key_word(block[i], packed + element * kTileKeys + key, elements - element);
        }
      }
    }
  }
}

template <class Format>
OSTINATO_KERNEL void pack_value_rows(const TileRows& tile, const TileRows& next, int64_t dim, int64_t columns, float* packed) {
  typedef typename Format::Source Source;
  for (int64_t key = 0; key < kTileKeys; ++key) {
    const Source* from = reinterpret_cast<const Source*>(tile.values[key]);
    float* to = packed + key * columns;
    int64_t column = 0;
    for (; column + kLanes <= dim; column += kLanes) {
      Vector::prefetch(reinterpret_cast<const Source*>(next.values[key]) + column);
      Vector::store(to + column, load_source(from + column));
    }
    for (; column < dim; ++column) {
      to[column] = widen(from[column]);
    }
    for (; column < columns; ++column) {
      to[column] = 0.0f;
    }
  }
}

#if defined(OSTINATO_AVX512_BF16)
OSTINATO_KERNEL void pack_value_pairs(const TileRows& tile, const TileRows& next, int64_t dim, int64_t columns, float* packed) {
  for (int64_t key = 0; key < kTileKeys; key += 2) {
    const uint16_t* even = reinterpret_cast<const uint16_t*>(tile.values[key]);
    const uint16_t* odd = reinterpret_cast<const uint16_t*>(tile.values[key + 1]);
    float* to = packed + key / 2 * columns;
    int64_t column = 0;
    for (; column + kLanes <= dim; column += kLanes) {
      Vector::store(to + column, Vector::interleave(even + column, odd + column));
      // a cache line of one row per step: even rows in even steps
      Vector::prefetch(next.values[key + column / kLanes % 2] + column / kLanes / 2 * 64);
    }
    for (; column < columns; column += kLanes) {
      uint16_t even_tail[kLanes] = {};
      uint16_t odd_tail[kLanes] = {};
      if (column < dim) {
        const size_t bytes = static_cast<size_t>(dim - column) * sizeof(uint16_t);
        std::memcpy(even_tail, even + column, bytes);
        std::memcpy(odd_tail, odd + column, bytes);
      }
      Vector::store(to + column, Vector::interleave(even_tail, odd_tail));
    }
  }
}
#endif

template <class Format>
OSTINATO_INLINE void pack_values(const TileRows& tile, const TileRows& next, int64_t dim, int64_t columns, float* packed) {
#if defined(OSTINATO_AVX512_BF16)
  if constexpr (Format::kKeysPerStep == 2) {
    pack_value_pairs(tile, next, dim, columns, packed);
    return;
  }
#endif
  pack_value_rows<Format>(tile, next, dim, columns, packed);
}

}  // namespace
}  // namespace ostinato
