// Linear layers in integers: exact 4-bit or 8-bit weights, inputs rounded to 8 or 16 bits in blocks of 32.
//
// A block of 32 inputs x of one row, with m the largest |x|, becomes
//   q[i] = round(x[i] * (most / m)), to nearest, ties to even;  a = m / most     (m below 1e-30: all zero)
// with most = 127, or 127 * 256 where inputs are fine, and an output, over the blocks of its inputs in ascending order,
// is one chain
//   4 bits:  t = fma(float(dot), scale * a, fma(minimum, a * float(sum of q), t))     dot = sum of weight 0..15 times q
//   8 bits:  t = fma(float(dot), scale * a, t)                                        dot = sum of weight -127..127 times q
// from t = 0, every operation in float32. dot is exact in integers, in any order. So a row sees nothing but itself: which
// rows share a call, how they are cut into tiles and which instructions multiply them changes when a number is computed, never how.
//
// What the instructions differ in: integer_vnni.h (AVX512-VNNI) and integer_avx2.h (AVX2).
#pragma once

#include <algorithm>
#include <cstdint>

#include "interface.h"
#include "linear.h"
#include "quantised.h"

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#include "integer_vnni.h"
#elif defined(PACELINE_BLOCKS)
#include "integer_avx2.h"
#endif

namespace {

constexpr int64_t kIntegers4 = 4, kIntegers8 = 5, kFine4 = 6, kFine8 = 7;

inline bool takes_integers(const Linear& linear) { return linear.format >= kIntegers4; }

#if defined(PACELINE_BLOCKS)
void put(Grouped4& block, int64_t output, const float* values, bool& same) {
  int q[kBlock];
  same &= find(values, block.scale[output], block.minimum[output], q);
  for (int64_t k = 0; k < kBlock; ++k) {
    block.q[k / 4][4 * (output % kLanes) + k % 4] |= static_cast<uint8_t>(output < kLanes ? q[k] : q[k] << 4);
  }
}

void put(Grouped8& block, int64_t output, const float* values, bool& same) {
  int q[kBlock];
  same &= find(values, block.scale[output], q);
  for (int64_t k = 0; k < kBlock; ++k) put(block, output, k, q[k]);
}

// One of so many rows that integer_product() takes together.
inline void quantise(const Linear& linear, const float* x, int64_t rows, Quantised* to) {
  switch (linear.format) {
    case kIntegers4: quantise<Grouped4, false>(x, linear.inputs, rows, to); break;
    case kIntegers8: quantise<Grouped8, false>(x, linear.inputs, rows, to); break;
    case kFine4: quantise<Grouped4, true>(x, linear.inputs, rows, to); break;
    default: quantise<Grouped8, true>(x, linear.inputs, rows, to);
  }
}

// All rows over one panel, a tile of them at a time: its sums stay in the first cache, the panel's weights in the second.
template <typename Block, bool kFine>
void integer_sums(const Linear& linear, int64_t panel, const Quantised* x, int64_t rows, float* c) {
  constexpr int64_t kTileRows = 24;
  const int64_t count = linear.inputs / kBlock, tiles = (rows + kTileRows - 1) / kTileRows;
  const Block* blocks = static_cast<const Block*>(linear.weight) + panel * count;
  int64_t row = 0;
  for (int64_t tile = 0; tile < tiles; ++tile) {  // of equal height, one row more or less: many rows have no tile of few
    const int64_t height = (rows - row + tiles - tile - 1) / (tiles - tile);
    integer_sums<Block, kFine>(blocks, count, x + row * count, height, c + row * kPanel);
    row += height;
  }
}
#else
inline void quantise(const Linear&, const float*, int64_t, Quantised*) {}
#endif

// One panel of outputs for all rows into c [rows][32].
void integer_product(const Linear& linear, int64_t panel, const Quantised* x, int64_t rows, float* c) {
#if defined(PACELINE_BLOCKS)
  switch (linear.format) {
    case kIntegers4: integer_sums<Grouped4, false>(linear, panel, x, rows, c); break;
    case kIntegers8: integer_sums<Grouped8, false>(linear, panel, x, rows, c); break;
    case kFine4: integer_sums<Grouped4, true>(linear, panel, x, rows, c); break;
    default: integer_sums<Grouped8, true>(linear, panel, x, rows, c);
  }
#endif
  add_bias(linear, panel, rows, c);
}

}  // namespace
