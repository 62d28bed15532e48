// Registers the operators under the namespace `ostinato`, and the small ones: writing tokens into pages, copying whole
// pages, row-wise argmax. Built on torch's stable ABI: no Python, no pybind, valid from torch 2.10 on.
#include "operators.h"

#include <cstring>

namespace ostinato {
namespace {

struct RowCopy {
  const char* from;
  int64_t from_token;
  int64_t from_head;
  char* to;
  int64_t to_block;
  int64_t to_head;
  int64_t to_token;
  size_t bytes;
};

// Strides in bytes; one row is one head of one token.
RowCopy row_copy(const Tensor& rows, const Tensor& pages) {
  const int64_t item = static_cast<int64_t>(rows.element_size());
  return {static_cast<const char*>(rows.data_ptr()),
          rows.stride(0) * item,
          rows.stride(1) * item,
          static_cast<char*>(pages.data_ptr()),
          pages.stride(0) * item,
          pages.stride(1) * item,
          pages.stride(2) * item,
          static_cast<size_t>(rows.size(2) * item)};
}

void copy_token(const RowCopy& copy, int64_t token, int64_t heads, int64_t block, int64_t offset) {
  const char* from = copy.from + token * copy.from_token;
  char* to = copy.to + block * copy.to_block + offset * copy.to_token;
  for (int64_t head = 0; head < heads; ++head) {
    std::memcpy(to + head * copy.to_head, from + head * copy.from_head, copy.bytes);
  }
}

void check_rows(const Tensor& rows, const Tensor& pages) {
  STD_TORCH_CHECK(rows.is_cpu() && pages.is_cpu(), "write_kv takes CPU tensors");
  STD_TORCH_CHECK(rows.dim() == 3 && pages.dim() == 4, "rows are [tokens, heads, dim], pages [blocks, heads, size, dim]");
  STD_TORCH_CHECK(rows.scalar_type() == pages.scalar_type(), "rows and pages must share one dtype");
  STD_TORCH_CHECK(rows.size(1) == pages.size(1) && rows.size(2) == pages.size(3), "rows do not fit the pages");
  STD_TORCH_CHECK(has_dense_rows(rows) && has_dense_rows(pages), "the last dimension must be contiguous");
}

void check_pages(const Tensor& pages) {
  STD_TORCH_CHECK(pages.is_cpu() && pages.dim() == 2 && pages.scalar_type() == ScalarType::Byte,
                  "pages must be uint8 [count, page_bytes] on the CPU");
  STD_TORCH_CHECK(has_dense_rows(pages), "a page must be contiguous");
}

const int64_t* checked_index(const Tensor& index, int64_t count, int64_t limit) {
  STD_TORCH_CHECK(index.is_cpu() && index.dim() == 1 && index.scalar_type() == ScalarType::Long &&
                      index.is_contiguous() && index.size(0) == count,
                  "page indices must be contiguous int64 vectors of one length");
  const int64_t* pages = static_cast<const int64_t*>(index.data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(pages[i] >= 0 && pages[i] < limit, "page index ", pages[i], " is outside [0, ", limit, ")");
  }
  return pages;
}

int64_t best_isa_level() { return static_cast<int64_t>(best_isa()); }

}  // namespace

void write_kv(const Tensor key, const Tensor value, Tensor key_pages, Tensor value_pages, const Tensor slots) {
  constexpr int64_t kTokensPerThread = 64;
  check_rows(key, key_pages);
  check_rows(value, value_pages);
  check_int32(slots, 1, "slots");
  const int64_t tokens = key.size(0);
  const int64_t heads = key.size(1);
  const int64_t block_size = key_pages.size(2);
  STD_TORCH_CHECK(value.size(0) == tokens && slots.size(0) == tokens, "key, value and slots differ in tokens");
  STD_TORCH_CHECK(value_pages.size(0) == key_pages.size(0) && value_pages.size(1) == heads &&
                      value_pages.size(2) == block_size,
                  "key and value pages must agree in blocks, heads and block size");
  const int64_t slot_count = key_pages.size(0) * block_size;
  const int32_t* slot = static_cast<const int32_t*>(slots.data_ptr());
  for (int64_t token = 0; token < tokens; ++token) {
    STD_TORCH_CHECK(slot[token] < slot_count, "slot ", slot[token], " is beyond the pool of ", slot_count);
  }
  const RowCopy key_copy = row_copy(key, key_pages);
  const RowCopy value_copy = row_copy(value, value_pages);
  torch::stable::parallel_for(0, tokens, kTokensPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      if (slot[token] < 0) {
        continue;
      }
      const int64_t block = slot[token] / block_size;
      const int64_t offset = slot[token] % block_size;
      copy_token(key_copy, token, heads, block, offset);
      copy_token(value_copy, token, heads, block, offset);
    }
  });
}

// Runs on the calling thread alone: transfers must not take threads from the compute pool.
void copy_pages(const Tensor source, Tensor target, const Tensor source_index, const Tensor target_index) {
  check_pages(source);
  check_pages(target);
  STD_TORCH_CHECK(source.size(1) == target.size(1), "source and target pages differ in bytes");
  STD_TORCH_CHECK(source_index.dim() == 1, "page indices must be vectors");
  const int64_t count = source_index.size(0);
  const int64_t* from = checked_index(source_index, count, source.size(0));
  const int64_t* to = checked_index(target_index, count, target.size(0));
  const char* source_bytes = static_cast<const char*>(source.data_ptr());
  char* target_bytes = static_cast<char*>(target.data_ptr());
  const size_t page_bytes = static_cast<size_t>(source.size(1));
  for (int64_t i = 0; i < count; ++i) {
    std::memmove(target_bytes + to[i] * target.stride(0), source_bytes + from[i] * source.stride(0), page_bytes);
  }
}

Tensor argmax_rows(const Tensor logits, int64_t isa) {
  STD_TORCH_CHECK(logits.is_cpu() && logits.dim() == 2 && logits.size(1) > 0 && has_dense_rows(logits),
                  "logits must be [rows, vocabulary] on the CPU, rows contiguous");
  const Tensor out = torch::stable::new_empty(logits, {logits.size(0)}, ScalarType::Long);
  const auto argmax = kernels_for(isa).argmax[dtype_index(logits)];
  const char* rows = static_cast<const char*>(logits.data_ptr());
  const int64_t row_bytes = logits.stride(0) * static_cast<int64_t>(logits.element_size());
  const int64_t columns = logits.size(1);
  int64_t* result = static_cast<int64_t*>(out.data_ptr());
  torch::stable::parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      result[row] = argmax(rows + row * row_bytes, columns);
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY(ostinato, library) {
  library.def(
      "paged_attention(Tensor query, Tensor key_pages, Tensor value_pages, Tensor block_table, Tensor cu_q, "
      "Tensor seq_lens, Tensor(a!) out, float scale, int window, int chunk, float softcap, Tensor? sinks, "
      "int isa=-1) -> ()");
  library.def("write_kv(Tensor key, Tensor value, Tensor(a!) key_pages, Tensor(b!) value_pages, Tensor slots) -> ()");
  library.def("copy_pages(Tensor source, Tensor(a!) target, Tensor source_index, Tensor target_index) -> ()");
  library.def("argmax_rows(Tensor logits, int isa=-1) -> Tensor");
  library.def("best_isa() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(ostinato, CPU, library) {
  library.impl("paged_attention", TORCH_BOX(&paged_attention));
  library.impl("write_kv", TORCH_BOX(&write_kv));
  library.impl("copy_pages", TORCH_BOX(&copy_pages));
  library.impl("argmax_rows", TORCH_BOX(&argmax_rows));
}

STABLE_TORCH_LIBRARY_IMPL(ostinato, CompositeExplicitAutograd, library) {
  library.impl("best_isa", TORCH_BOX(&best_isa_level));
}

}  // namespace ostinato
