// Weights asked for in advance.
#pragma once

#include <cstdint>

namespace {

// What this thread will read next, brought into the second cache piece by piece while it computes something else.
class Ahead {
 public:
  void aim(const void* begin, int64_t bytes) {
    at_ = static_cast<const char*>(begin);
    end_ = at_ + bytes;
  }

  void ask(int64_t lines) {
    for (; lines > 0 && at_ < end_; --lines, at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

}  // namespace
