// Integer products with AVX2, eight outputs at a time.
//
// 4-bit weights: one instruction multiplies four inputs with eight outputs' weights, 0 to 15, into sums of 16 bits, which hold a whole
// block: 16 products of at most 15 * 128. 8-bit weights would not fit; they are multiplied as words, numbers of 16 bits, two inputs at a
// time, into sums of 32 bits, and inputs of 16 bits need no halves there. So are 4-bit weights with such inputs, where rows are many:
// taking the weights apart is more work, but their halves need sums of their own, and two rows' are all that registers hold.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "linear.h"
#include "quantised.h"
#include "vectors.h"

namespace {

constexpr int kEight = 8;           // outputs of a register
constexpr int kPairs = kBlock / 2;  // of inputs
constexpr int64_t kInHalves = 2;    // most rows whose 16-bit inputs are taken in halves by 4-bit weights

// Block8 for an output two inputs side by side.
struct Grouped8 {
  uint16_t scale[kPanel];
  int8_t q[kPanel / kEight][kPairs][2 * kEight];
};

inline void put(Grouped8& block, int64_t output, int64_t input, int weight) {
  block.q[output / kEight][input / 2][2 * (output % kEight) + input % 2] = static_cast<int8_t>(weight);
}

// Four times eight numbers that fit, in order.
inline void put_bytes(int8_t* to, const __m256i (&q)[4]) {
  const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(mixed, order));
}

inline void put_shorts(int16_t* to, const __m256i (&q)[4]) {
  for (int half = 0; half < 2; ++half) {
    const __m256i mixed = _mm256_packs_epi32(q[2 * half], q[2 * half + 1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + half, _mm256_permute4x64_epi64(mixed, 0b11011000));
  }
}

template <typename Reduce>
inline int32_t reduce(__m256i eight, Reduce&& by) {
  __m128i four = by(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = by(four, _mm_shuffle_epi32(four, 0b01001110));
  return _mm_cvtsi128_si32(by(four, _mm_shuffle_epi32(four, 0b10110001)));
}

// One of so many rows that are multiplied together.
template <typename Block, bool kFine>
void quantise(const float* x, int64_t inputs, int64_t rows, Quantised* to) {
  constexpr bool kBytes = std::is_same<Block, Grouped8>::value;
  const bool words = kBytes || (kFine && rows > kInHalves);
  constexpr float kMost = kFine ? 127 * 256 : 127;
  const __m256 sign = _mm256_set1_ps(-0.0f);
  for (int64_t at = 0; at < inputs; at += kBlock, ++to) {
    // Compared as integers: a number that is none is above all others and comes out in the scale.
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
      largest = _mm256_max_epi32(largest, _mm256_castps_si256(_mm256_andnot_ps(sign, _mm256_loadu_ps(x + at + i * kEight))));
    }
    const int32_t most_bits = reduce(largest, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); });
    float most;
    std::memcpy(&most, &most_bits, sizeof most);
    if (most < 1e-30f) {
      *to = Quantised{};
      continue;
    }
    const __m256 by = _mm256_set1_ps(kMost / most);
    __m256i q[4], sums = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
      q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + at + i * kEight), by));
      sums = _mm256_add_epi32(sums, q[i]);
    }
    if (words) {
      if (!kBytes) {
        for (__m256i& eight : q) eight = _mm256_shuffle_epi32(eight, 0b11011000);  // of four the first and third, then the others
      }
      put_shorts(to->whole, q);
    } else if (kFine) {
      __m256i upper[4], lower[4];
      for (int i = 0; i < 4; ++i) {
        upper[i] = _mm256_srai_epi32(_mm256_add_epi32(q[i], _mm256_set1_epi32(128)), 8);
        lower[i] = _mm256_sub_epi32(q[i], _mm256_slli_epi32(upper[i], 8));
      }
      put_bytes(to->parts[0], upper);
      put_bytes(to->parts[1], lower);
    } else {
      put_bytes(to->parts[0], q);
    }
    const int32_t sum = reduce(sums, [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); });
    to->scale = most / kMost;
    to->sum = to->scale * static_cast<float>(sum);
  }
}

// Four bytes, or two numbers of 16 bits, in every lane.
inline __m256i splat_four(const void* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm256_set1_epi32(four);
}

inline __m256 widen_eight(const uint16_t* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }

// to = fma(dot, scale, before): `before` is what stands there, from zero when `first`.
inline void add_eight(__m256i dot, __m256 scale, __m256 before, float* to) {
  _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, before));
}

inline __m256 before(const float* at, bool first) { return first ? _mm256_setzero_ps() : _mm256_loadu_ps(at); }

// Leaves a sum in its register: left alone, the compiler moves it to another with every addition.
inline void keep(__m256i& sum) { asm("" : "+x"(sum)); }

// Sums of eight outputs and of those 16 further on.
template <int kRows>
using Sums = __m256i[kRows][2];

template <int kRows>
inline void clear(Sums<kRows>& sums) {
  for (auto& row : sums) row[0] = row[1] = _mm256_setzero_si256();
}

// 4-bit weights of eight outputs and those 16 further on, four inputs side by side, times a part of the inputs in bytes.
template <int kRows>
inline void add_bytes(const Grouped4& block, int from, const Quantised* x, int64_t stride, Sums<kRows>* parts, int count) {
  const __m256i low_half = _mm256_set1_epi8(15);
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block.q[g] + 4 * from));
    const __m256i weights[2] = {_mm256_and_si256(both, low_half), _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half)};
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int p = 0; p < count; ++p) {
        const __m256i four = splat_four(x[r * stride].parts[p] + 4 * g);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          parts[p][r][h] = _mm256_add_epi16(parts[p][r][h], _mm256_maddubs_epi16(weights[h], four));
          keep(parts[p][r][h]);
        }
      }
    }
  }
}

// The same in words: of four inputs the first and third, then the others.
template <int kRows>
inline void add_words(const Grouped4& block, int from, const Quantised* x, int64_t stride, Sums<kRows>& sums) {
  const __m256i low = _mm256_set1_epi16(15);
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block.q[g] + 4 * from));
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const __m256i weights[2] = {
          _mm256_and_si256(pair == 0 ? both : _mm256_srli_epi16(both, 8), low),
          pair == 0 ? _mm256_and_si256(_mm256_srli_epi16(both, 4), low) : _mm256_srli_epi16(both, 12),
      };
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m256i two = splat_four(x[r * stride].whole + 4 * g + 2 * pair);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          sums[r][h] = _mm256_add_epi32(sums[r][h], _mm256_madd_epi16(weights[h], two));
          keep(sums[r][h]);
        }
      }
    }
  }
}

// A block's part of the sums of kRows rows, c [kRows][32]; the rows' blocks lie `stride` apart.
template <bool kFine, int kRows>
inline void add_block(const Grouped4& block, const Quantised* x, int64_t stride, bool first, float* c) {
  constexpr bool kWords = kFine && kRows > kInHalves;
  constexpr int kParts = kFine && !kWords ? 2 : 1;
  const __m256i one = _mm256_set1_epi16(1), upper = _mm256_set1_epi16(kFine ? 256 : 1);
  for (int from = 0; from < kLanes; from += kEight) {  // of outputs 0 to 15, and with them of those 16 further on
    Sums<kRows> parts[kParts];
    for (auto& part : parts) clear<kRows>(part);
    if (kWords) {
      add_words<kRows>(block, from, x, stride, parts[0]);
    } else {
      add_bytes<kRows>(block, from, x, stride, parts, kParts);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const int output = from + h * kLanes;
      const __m256 scale = widen_eight(block.scale + output), minimum = widen_eight(block.minimum + output);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        __m256i dot = kWords ? parts[0][r][h] : _mm256_madd_epi16(parts[0][r][h], upper);
        if (kParts == 2) dot = _mm256_add_epi32(dot, _mm256_madd_epi16(parts[kParts - 1][r][h], one));
        const Quantised& own = x[r * stride];
        float* to = c + r * kPanel + output;
        add_eight(dot, _mm256_mul_ps(scale, _mm256_set1_ps(own.scale)),
                  _mm256_fmadd_ps(minimum, _mm256_set1_ps(own.sum), before(to, first)), to);
      }
    }
  }
}

template <bool kFine, int kRows>
inline void add_block(const Grouped8& block, const Quantised* x, int64_t stride, bool first, float* c) {
  for (int from = 0; from < kPanel; from += 2 * kEight) {
    __m256i sums[kRows][2];
    for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int pair = 0; pair < kPairs; ++pair) {
      __m256i weights[2];
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m128i* bytes = reinterpret_cast<const __m128i*>(block.q[from / kEight + h][pair]);
        weights[h] = _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes));
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m256i two = splat_four(x[r * stride].whole + 2 * pair);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          sums[r][h] = _mm256_add_epi32(sums[r][h], _mm256_madd_epi16(weights[h], two));
          keep(sums[r][h]);
        }
      }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256 scale = widen_eight(block.scale + from + h * kEight);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        float* to = c + r * kPanel + from + h * kEight;
        add_eight(sums[r][h], _mm256_mul_ps(scale, _mm256_set1_ps(x[r * stride].scale)), before(to, first), to);
      }
    }
  }
}

template <typename Block, bool kFine, int kRows>
void add_blocks(const Block* blocks, int64_t count, const Quantised* x, bool asks, float* c) {
  for (int64_t b = 0; b < count; ++b) {
    if (asks) prefetch(blocks + b);
    add_block<kFine, kRows>(blocks[b], x + b, count, b == 0, c);
  }
}

template <typename Block, bool kFine>
inline void integer_sums(const Block* blocks, int64_t count, const Quantised* x, int64_t rows, float* c) {
  // As many as have their sums in registers, measured: more would be put aside and fetched again.
  constexpr int64_t kMost = std::is_same<Block, Grouped8>::value ? 4 : 6;
  constexpr void (*kAdd[])(const Block*, int64_t, const Quantised*, bool, float*) = {
      nullptr, add_blocks<Block, kFine, 1>, add_blocks<Block, kFine, 2>,
      add_blocks<Block, kFine, std::min<int>(kMost, 3)>, add_blocks<Block, kFine, std::min<int>(kMost, 4)>,
      add_blocks<Block, kFine, std::min<int>(kMost, 5)>, add_blocks<Block, kFine, kMost>,
  };
  const int64_t tiles = (rows + kMost - 1) / kMost;
  int64_t row = 0;
  for (int64_t tile = 0; tile < tiles; ++tile) {  // tiles of equal height, one row more or less
    const int64_t height = (rows - row + tiles - tile - 1) / (tiles - tile);
    kAdd[height](blocks, count, x + row * count, tile == 0, c + row * kPanel);
    row += height;
  }
}

}  // namespace
