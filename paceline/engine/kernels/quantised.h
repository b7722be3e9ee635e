// What integer products are made of: rounded inputs, and weights as they lie in memory.
#pragma once

#include <cstdint>

#include "linear.h"

namespace {

constexpr int kGroups = kBlock / 4;  // of inputs that one instruction takes for an output

// A block of one row's inputs.
struct alignas(16) Quantised {
  union {
    int8_t parts[2][kBlock];  // q; where inputs are fine the upper halves, then the lower: q = 256 * upper + lower
    int16_t whole[kBlock];    // q, as AVX2 takes it for 8-bit weights
  };
  float scale;
  float sum;       // scale * sum of q: what the minimum of a 4-bit weight is multiplied by
  int32_t offset;  // -128 * sum of q: VNNI takes 8-bit weights 128 too high
};

// Block4 with its numbers in another order, for an output four inputs side by side: [input / 4][output][input % 4]. Low halves of the
// bytes are outputs 0 to 15, high halves 16 to 31.
struct Grouped4 {
  uint16_t scale[kPanel];  // float16
  uint16_t minimum[kPanel];
  uint8_t q[kGroups][4 * kLanes];
};

}  // namespace
