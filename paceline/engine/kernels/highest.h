// The largest logit of a row, found while logits are made: reading them once more costs more than comparing them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace {

// Of those that a thread has made, lane by lane.
class Highest {
 public:
  void start() {
    top_ = splat(-INFINITY);
    index_ = splat(INT32_MAX);
    odd_ = IntVec{};
  }

  // Logits `first` to `first` + 15, of which `count` exist.
  void add(Vec values, int64_t first, int64_t count) {
    const IntVec index = places() + splat(static_cast<int32_t>(first));
    const IntVec exists = places() < splat(static_cast<int32_t>(std::min<int64_t>(count, kLanes)));
    const IntVec higher = exists & ((values > top_) | ((values == top_) & (index < index_)));
    top_ = select(higher, values, top_);
    index_ = select(higher, index, index_);
    odd_ |= exists & (values != values);
  }

  void merge(const Highest& other) {
    const IntVec higher = (other.top_ > top_) | ((other.top_ == top_) & (other.index_ < index_));
    top_ = select(higher, other.top_, top_);
    index_ = select(higher, other.index_, index_);
    odd_ |= other.odd_;
  }

  void write(int64_t* best, float* top) const {
    int lane = 0;
    bool odd = odd_[0] != 0;
    for (int i = 1; i < kLanes; ++i) {
      odd = odd || odd_[i] != 0;
      if (top_[i] > top_[lane] || (top_[i] == top_[lane] && index_[i] < index_[lane])) lane = i;
    }
    *best = index_[lane];
    *top = odd ? NAN : top_[lane];
  }

 private:
  Vec top_;
  IntVec index_, odd_;
};

}  // namespace
