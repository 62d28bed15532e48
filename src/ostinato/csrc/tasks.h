// How an operator runs its tasks on torch's thread pool, and the memory that a task works in.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>

namespace ostinato {

// Memory of one thread, kept between calls: an allocation per layer and step would fault its pages in every time.
class TaskMemory {
 public:
  float* reserve(int64_t floats) {
    if (floats > capacity_) {
      memory_.reset();
      capacity_ = 0;
      memory_.reset(static_cast<float*>(::operator new[](static_cast<size_t>(floats) * sizeof(float), kAlignment)));
      capacity_ = floats;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Release {
    void operator()(float* memory) const { ::operator delete[](memory, kAlignment); }
  };
  std::unique_ptr<float, Release> memory_;
  int64_t capacity_ = 0;
};

// 64-byte aligned, private to the calling thread, valid until its next call.
inline float* task_memory(int64_t floats) {
  thread_local TaskMemory memory;
  return memory.reserve(floats);
}

// Calls body(task, memory) for every task in [0, count). Threads take the next task when they are done with one: tasks
// differ in length, and cores may be shared. `cost`: multiply-adds of all tasks together.
template <class Body>
void run_tasks(int64_t count, int64_t cost, int64_t memory_floats, const Body& body) {
  constexpr int64_t kWorthThreads = 1 << 18;  // less than this is done before a thread wakes up
  const int64_t threads = cost < kWorthThreads ? 1 : static_cast<int64_t>(torch::stable::get_num_threads());
  if (threads <= 1 || count <= 1) {
    float* memory = task_memory(memory_floats);
    for (int64_t task = 0; task < count; ++task) {
      body(task, memory);
    }
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min(count, threads), 1, [&](int64_t, int64_t) {
    float* memory = task_memory(memory_floats);
    for (int64_t task = next.fetch_add(1); task < count; task = next.fetch_add(1)) {
      body(task, memory);
    }
  });
}

}  // namespace ostinato
