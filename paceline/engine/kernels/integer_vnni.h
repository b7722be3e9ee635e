// Integer products with AVX512-VNNI: one instruction multiplies four inputs with the weights of 16 outputs and adds them up.
//
// It wants weights without a sign, so those of 8 bits are stored 128 too high and a sum begins that much lower.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "linear.h"
#include "quantised.h"
#include "vectors.h"

namespace {

// Block8 for an output four inputs side by side, weight + 128: outputs 0 to 15, then 16 to 31.
struct Grouped8 {
  uint16_t scale[kPanel];
  uint8_t q[2][kGroups][4 * kLanes];
};

inline void put(Grouped8& block, int64_t output, int64_t input, int weight) {
  block.q[output / kLanes][input / 4][4 * (output % kLanes) + input % 4] = static_cast<uint8_t>(weight + 128);
}

inline void put_bytes(int8_t* to, __m512i low, __m512i high) {
  _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(low));
  _mm_store_si128(reinterpret_cast<__m128i*>(to) + 1, _mm512_cvtepi32_epi8(high));
}

inline __m512i upper_half(__m512i q) { return _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8); }

template <typename Block, bool kFine>
void quantise(const float* x, int64_t inputs, int64_t, Quantised* to) {
  constexpr float kMost = kFine ? 127 * 256 : 127;
  for (int64_t at = 0; at < inputs; at += kBlock, ++to) {
    const __m512 low = _mm512_loadu_ps(x + at), high = _mm512_loadu_ps(x + at + kLanes);
    // Compared as integers: a number that is none is above all others and comes out in the scale.
    const __m512i bits = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(low)), _mm512_castps_si512(_mm512_abs_ps(high)));
    const int32_t most_bits = _mm512_reduce_max_epi32(bits);
    float most;
    std::memcpy(&most, &most_bits, sizeof most);
    if (most < 1e-30f) {
      *to = Quantised{};
      continue;
    }
    const __m512 by = _mm512_set1_ps(kMost / most);
    const __m512i low_q = _mm512_cvtps_epi32(_mm512_mul_ps(low, by));
    const __m512i high_q = _mm512_cvtps_epi32(_mm512_mul_ps(high, by));
    put_bytes(to->parts[0], kFine ? upper_half(low_q) : low_q, kFine ? upper_half(high_q) : high_q);
    if (kFine) put_bytes(to->parts[1], low_q, high_q);
    const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low_q, high_q));
    to->scale = most / kMost;
    to->sum = to->scale * static_cast<float>(sum);
    to->offset = static_cast<int32_t>(-128u * static_cast<uint32_t>(sum));  // wraps where the row is no number
  }
}

// The 32 x 32 weights of a block, ready for any number of rows.
struct Weights {
  __m512i q[kGroups][2];  // for outputs 0 to 15, and 16 to 31
  __m512 scale[2];
  __m512 minimum[2];  // of 4-bit weights
};

inline __m512i four_inputs(const int8_t* q, int group) {
  int32_t four;
  std::memcpy(&four, q + 4 * group, sizeof four);
  return _mm512_set1_epi32(four);
}

// A block times the blocks of kRows rows, which lie `stride` apart: two rows at a time keep both multipliers busy, where the sums of
// one wait for themselves. For 8-bit weights a sum begins at the row's offset.
template <bool kFine, bool kOffset, int kRows>
inline void dot(const Weights& weights, const Quantised* x, int64_t stride, __m512 (&found)[kRows][2]) {
  __m512i upper[kRows][2], lower[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    const __m512i from = kOffset ? _mm512_set1_epi32(x[r * stride].offset) : _mm512_setzero_si512();
    for (int h = 0; h < 2; ++h) {
      upper[r][h] = kFine ? _mm512_setzero_si512() : from;
      lower[r][h] = from;
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      const __m512i four = four_inputs(x[r * stride].parts[0], g);
      for (int h = 0; h < 2; ++h) upper[r][h] = _mm512_dpbusd_epi32(upper[r][h], weights.q[g][h], four);
      if (kFine) {
        const __m512i rest = four_inputs(x[r * stride].parts[1], g);
        for (int h = 0; h < 2; ++h) lower[r][h] = _mm512_dpbusd_epi32(lower[r][h], weights.q[g][h], rest);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int h = 0; h < 2; ++h) {
      const __m512i whole = kFine ? _mm512_add_epi32(_mm512_slli_epi32(upper[r][h], 8), lower[r][h]) : upper[r][h];
      found[r][h] = _mm512_cvtepi32_ps(whole);
    }
  }
}

inline void open(const Grouped4& block, Weights& weights) {
  const __m512i half = _mm512_set1_epi8(15);
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) {
    const __m512i both = _mm512_loadu_si512(block.q[g]);
    weights.q[g][0] = _mm512_and_si512(both, half);
    weights.q[g][1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
  }
  for (int h = 0; h < 2; ++h) {
    weights.scale[h] = (__m512)widen(block.scale + h * kLanes);
    weights.minimum[h] = (__m512)widen(block.minimum + h * kLanes);
  }
}

inline void open(const Grouped8& block, Weights& weights) {
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) {
    for (int h = 0; h < 2; ++h) weights.q[g][h] = _mm512_loadu_si512(block.q[h][g]);
  }
  for (int h = 0; h < 2; ++h) weights.scale[h] = (__m512)widen(block.scale + h * kLanes);
}

// A block's part of the sums of kRows rows, c [kRows][32].
template <bool kFine, bool kMinimum, int kRows>
inline void add_block(const Weights& weights, const Quantised* x, int64_t stride, bool first, float* c) {
  __m512 found[kRows][2];
  dot<kFine, !kMinimum, kRows>(weights, x, stride, found);
  for (int r = 0; r < kRows; ++r) {
    const __m512 scale = _mm512_set1_ps(x[r * stride].scale);
    for (int h = 0; h < 2; ++h) {
      float* to = c + r * kPanel + h * kLanes;
      __m512 before = first ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
      if (kMinimum) before = _mm512_fmadd_ps(weights.minimum[h], _mm512_set1_ps(x[r * stride].sum), before);
      _mm512_storeu_ps(to, _mm512_fmadd_ps(found[r][h], _mm512_mul_ps(weights.scale[h], scale), before));
    }
  }
}

template <typename Block, bool kFine>
inline void integer_sums(const Block* blocks, int64_t count, const Quantised* x, int64_t rows, float* c) {
  constexpr bool kMinimum = std::is_same<Block, Grouped4>::value;
  for (int64_t b = 0; b < count; ++b) {
    prefetch(blocks + b);
    Weights weights;
    open(blocks[b], weights);
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) {
      add_block<kFine, kMinimum, 2>(weights, x + r * count + b, count, b == 0, c + r * kPanel);
    }
    if (r < rows) add_block<kFine, kMinimum, 1>(weights, x + r * count + b, count, b == 0, c + r * kPanel);
  }
}

}  // namespace
