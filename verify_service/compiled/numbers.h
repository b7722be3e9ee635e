// Python's arithmetic where C++ would go on quietly. What Python refuses (and a sort could not order) ends the call with
// `Unusual`; the step is then decided in Python, which says what is wrong, or copes.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

struct Unusual {};

constexpr int kMaxK = 64;
constexpr int64_t kMost = 1 << 20;  // sequences and rows of a step; Python has no such bound

inline void expect(bool usual) {
  if (!usual) throw Unusual();
}

inline bool within(int64_t value, int64_t least, int64_t most) { return least <= value && value <= most; }

// a / b.
inline double over(double a, double b) {
  expect(b != 0.0);
  return a / b;
}

// int(value): towards zero.
inline int64_t whole(double value) {
  expect(-2e9 < value && value < 2e9);  // false for what is no number, too
  return static_cast<int64_t>(value);
}

inline int64_t ceiling(double value) { return whole(std::ceil(value)); }

// std::min and std::max give what Python's do, whatever is no number: the first argument unless the second is beyond it.

}  // namespace
