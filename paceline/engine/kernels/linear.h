// Linear layers in float32: exact weights, one chain of fused multiply-adds an output.
//
// Weights lie in panels of 32 outputs: [panel][input][32].
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "interface.h"
#include "vectors.h"

namespace {

constexpr int kPanel = 2 * kLanes;
constexpr int kDepth = 192;  // inputs of a panel that stay in the first cache while all rows pass over them
constexpr int kAhead = 32;  // inputs that are asked for in advance: with several rows the processor's own guess is late

constexpr int kPanelRegs = kPanel / kReg;
constexpr int kMaxRows = kSums / kPanelRegs;

// c[r][0..31] += x[r][0..depth) times weight[0..depth)[0..31]; from zero when `first`.
template <int kRows>
void multiply(const float* x, int64_t stride, const float* weight, int64_t depth, float* c, bool first) {
  Reg total[kRows][kPanelRegs];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kPanelRegs; ++i) total[r][i] = first ? Reg{} : load_reg(c + r * kPanel + i * kReg);
  }
  for (int64_t k = 0; k < depth; ++k) {
    Reg values[kPanelRegs];
#pragma GCC unroll 4
    for (int i = 0; i < kPanelRegs; ++i) values[i] = load_reg(weight + k * kPanel + i * kReg);
    __builtin_prefetch(weight + (k + kAhead) * kPanel);
    __builtin_prefetch(weight + (k + kAhead) * kPanel + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Reg input = splat_reg(x[r * stride + k]);
#pragma GCC unroll 4
      for (int i = 0; i < kPanelRegs; ++i) total[r][i] = fma(input, values[i], total[r][i]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kPanelRegs; ++i) store(c + r * kPanel + i * kReg, total[r][i]);
  }
}

using Multiply = void (*)(const float*, int64_t, const float*, int64_t, float*, bool);

constexpr Multiply kMultiply[] = {
    nullptr, multiply<1>, multiply<2>, multiply<3>,
#if defined(__AVX512F__)
    multiply<4>, multiply<5>, multiply<6>, multiply<7>, multiply<8>, multiply<9>, multiply<10>, multiply<11>, multiply<12>,
#endif
};

constexpr int64_t kBlock = 32;  // inputs that share a scale
constexpr int kSoon = 4, kLater = 20;  // blocks

#if defined(__F16C__) && defined(__FMA__) && defined(__AVX2__)
#define PACELINE_BLOCKS  // the processor has what weights in blocks of 4 and 8 bits need

// 4 bits: value = scale * q + minimum with q of 0 .. 15. One block of one panel; low halves of the bytes are outputs 0
// to 15, high halves 16 to 31. scale * q is exact, so the one rounding of the sum is that of the original numbers.
struct Block4 {
  uint16_t scale[kPanel];  // float16
  uint16_t minimum[kPanel];
  uint8_t q[kBlock][kLanes];
};

// 8 bits: value = scale * q with q of -127 .. 127, exactly.
struct Block8 {
  uint16_t scale[kPanel];
  int8_t q[kBlock][kPanel];
};

// Gives the 32 weights of one input after the other.
class Reader4 {
 public:
  explicit Reader4(const Block4& block) : block_(block) {
#pragma GCC unroll 4
    for (int i = 0; i < kPanelRegs; ++i) {
      scale_[i] = widen(block.scale + i * kReg);
      minimum_[i] = widen(block.minimum + i * kReg);
    }
  }

  void read(int64_t k, Reg (&to)[kPanelRegs]) const {
#if defined(__AVX512F__)
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block_.q[k])));
    const Reg low = (Reg)_mm512_permutexvar_ps(both, table);  // looks at the lowest four bits only
    const Reg high = (Reg)_mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), table);
    to[0] = fma(low, scale_[0], minimum_[0]);
    to[1] = fma(high, scale_[1], minimum_[1]);
#else
    for (int i = 0; i < kRegs; ++i) {
      const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(block_.q[k] + i * kReg)));
      const Reg low = (Reg)_mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(15)));
      const Reg high = (Reg)_mm256_cvtepi32_ps(_mm256_srli_epi32(both, 4));
      to[i] = fma(low, scale_[i], minimum_[i]);
      to[kRegs + i] = fma(high, scale_[kRegs + i], minimum_[kRegs + i]);
    }
#endif
  }

 private:
  const Block4& block_;
  Reg scale_[kPanelRegs], minimum_[kPanelRegs];
};

class Reader8 {
 public:
  explicit Reader8(const Block8& block) : block_(block) {
#pragma GCC unroll 4
    for (int i = 0; i < kPanelRegs; ++i) scale_[i] = widen(block.scale + i * kReg);
  }

  void read(int64_t k, Reg (&to)[kPanelRegs]) const {
#pragma GCC unroll 4
    for (int i = 0; i < kPanelRegs; ++i) to[i] = numbers(block_.q[k] + i * kReg) * scale_[i];
  }

 private:
  static Reg numbers(const int8_t* from) {
#if defined(__AVX512F__)
    return (Reg)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    return (Reg)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#endif
  }

  const Block8& block_;
  Reg scale_[kPanelRegs];
};

inline Reader4 reader(const Block4& block) { return Reader4(block); }
inline Reader8 reader(const Block8& block) { return Reader8(block); }

// Asks for the blocks that come soon, and those that come later into the second cache: what is under way at a time
// decides how fast memory is read, and the first cache alone does not have enough under way.
template <typename Block>
inline void prefetch(const Block* block) {
  const char* soon = reinterpret_cast<const char*>(block + kSoon);
  const char* later = reinterpret_cast<const char*>(block + kLater);
  for (size_t byte = 0; byte < sizeof(Block); byte += 64) {
    __builtin_prefetch(soon + byte);
    __builtin_prefetch(later + byte, 0, 2);
  }
}

// The product of a whole panel with a few rows: the weights never leave the registers.
template <typename Block, int kRows>
void multiply_blocks(const float* x, int64_t stride, const Block* blocks, int64_t count, float* c) {
  Reg total[kRows][kPanelRegs] = {};
  for (int64_t b = 0; b < count; ++b) {
    prefetch(blocks + b);
    const auto weights = reader(blocks[b]);
    for (int64_t k = 0; k < kBlock; ++k) {
      Reg values[kPanelRegs];
      weights.read(k, values);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const Reg input = splat_reg(x[r * stride + b * kBlock + k]);
#pragma GCC unroll 4
        for (int i = 0; i < kPanelRegs; ++i) total[r][i] = fma(input, values[i], total[r][i]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kPanelRegs; ++i) store(c + r * kPanel + i * kReg, total[r][i]);
  }
}

template <typename Block>
void multiply_blocks(const Linear& linear, int64_t panel, const float* x, int64_t rows, float* c) {
  constexpr void (*kKernels[])(const float*, int64_t, const Block*, int64_t, float*) = {
      nullptr,
      multiply_blocks<Block, 1>, multiply_blocks<Block, 2>, multiply_blocks<Block, 3>,
#if defined(__AVX512F__)
      multiply_blocks<Block, 4>, multiply_blocks<Block, 5>, multiply_blocks<Block, 6>, multiply_blocks<Block, 7>, multiply_blocks<Block, 8>,
      multiply_blocks<Block, 9>, multiply_blocks<Block, 10>, multiply_blocks<Block, 11>, multiply_blocks<Block, 12>,
#endif
  };
  const int64_t count = linear.inputs / kBlock;
  kKernels[rows](x, linear.inputs, static_cast<const Block*>(linear.weight) + panel * count, count, c);
}

template <typename Block>
const float* expand_blocks(const Linear& linear, int64_t panel, int64_t at, int64_t depth, float* scratch) {
  const Block* from = static_cast<const Block*>(linear.weight) + (panel * linear.inputs + at) / kBlock;
  for (int64_t i = 0; i < depth / kBlock; ++i) {
    prefetch(from + i);
    const auto weights = reader(from[i]);
    for (int64_t k = 0; k < kBlock; ++k) {
      Reg values[kPanelRegs];
      weights.read(k, values);
      for (int r = 0; r < kPanelRegs; ++r) store(scratch + (i * kBlock + k) * kPanel + r * kReg, values[r]);
    }
  }
  return scratch;
}

// ---- Finding that float32 numbers are those of a 4 or 8 bit file, and taking them back to it ----

inline uint16_t to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline float from_half(uint16_t value) { return _cvtsh_ss(value); }

bool find(const float* values, uint16_t& scale, uint16_t& minimum, int (&q)[kBlock]) {
  float low = values[0], high = values[0];
  for (int64_t i = 1; i < kBlock; ++i) {
    low = std::min(low, values[i]);
    high = std::max(high, values[i]);
  }
  minimum = to_half(low);
  if (from_half(minimum) != low) return false;
  const uint16_t near = to_half((high - low) / 15.0f);
  for (const int step : {0, 1, -1}) {  // the highest value was rounded: the scale may be a neighbour
    scale = static_cast<uint16_t>(near + step);
    const float by = from_half(scale);
    const float inverse = by != 0.0f ? 1.0f / by : 0.0f;
    bool same = true;
    for (int64_t i = 0; i < kBlock; ++i) {
      const int nearest = static_cast<int>((values[i] - low) * inverse + 0.5f);
      q[i] = nearest < 0 ? 0 : nearest > 15 ? 15 : nearest;
      same &= __builtin_fmaf(static_cast<float>(q[i]), by, low) == values[i];
    }
    if (same) return true;
  }
  return false;
}

bool find(const float* values, uint16_t& scale, int (&q)[kBlock]) {
  float high = 0.0f;
  for (int64_t i = 0; i < kBlock; ++i) high = std::max(high, std::fabs(values[i]));
  scale = to_half(high / 127.0f);
  const float by = from_half(scale);
  const float inverse = by != 0.0f ? 1.0f / by : 0.0f;
  bool same = true;
  for (int64_t i = 0; i < kBlock; ++i) {
    const float whole = std::nearbyint(values[i] * inverse);
    q[i] = static_cast<int>(std::min(127.0f, std::max(-127.0f, whole)));
    same &= static_cast<float>(q[i]) * by == values[i];
  }
  return same;
}

void put(Block4& block, int64_t output, const float* values, bool& same) {
  int q[kBlock];
  same &= find(values, block.scale[output], block.minimum[output], q);
  for (int64_t k = 0; k < kBlock; ++k) {
    block.q[k][output % kLanes] |= static_cast<uint8_t>(output < kLanes ? q[k] : q[k] << 4);
  }
}

void put(Block8& block, int64_t output, const float* values, bool& same) {
  int q[kBlock];
  same &= find(values, block.scale[output], q);
  for (int64_t k = 0; k < kBlock; ++k) block.q[k][output] = static_cast<int8_t>(q[k]);
}

template <typename Block>
bool pack_blocks(const float* weight, int64_t inputs, int64_t outputs, Block* to) {
  bool same = true;
  for (int64_t first = 0; first < outputs && same; first += kPanel) {
    for (int64_t at = 0; at < inputs && same; at += kBlock, ++to) {
      std::memset(to, 0, sizeof *to);
      for (int64_t output = 0; output < std::min<int64_t>(kPanel, outputs - first) && same; ++output) {
        put(*to, output, weight + (first + output) * inputs + at, same);
      }
    }
  }
  return same;
}
#endif

// `depth` inputs of a panel, from input `at` on, as float32.
inline const float* expand(const Linear& linear, int64_t panel, int64_t at, int64_t depth, float* scratch) {
#if defined(PACELINE_BLOCKS)
  if (linear.format == 2) return expand_blocks<Block4>(linear, panel, at, depth, scratch);
  if (linear.format == 3) return expand_blocks<Block8>(linear, panel, at, depth, scratch);
#endif
  const int64_t first = (panel * linear.inputs + at) * kPanel;
  if (linear.format == 0) return static_cast<const float*>(linear.weight) + first;
  const uint16_t* from = static_cast<const uint16_t*>(linear.weight) + first;
  uint32_t* to = reinterpret_cast<uint32_t*>(scratch);
  for (int64_t i = 0; i < depth * kPanel; ++i) to[i] = static_cast<uint32_t>(from[i]) << 16;
  return scratch;
}

// All rows over one panel in steps of kDepth inputs, whose float32 form stays in the first cache meanwhile.
void panel_sums(const Linear& linear, int64_t panel, const float* x, int64_t rows, float* c, float* scratch) {
  const int64_t inputs = linear.inputs;
  // A few rows pass over a panel once, so nothing is gained by stopping on the way.
  const int64_t step = linear.format == 0 && rows <= kMaxRows ? inputs : kDepth;
  const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t at = 0; at < inputs; at += step) {
    const int64_t depth = std::min(step, inputs - at);
    const float* weight = expand(linear, panel, at, depth, scratch);
    int64_t row = 0;
    for (int64_t tile = 0; tile < tiles; ++tile) {  // tiles of equal height, one row more or less
      const int64_t height = (rows - row + tiles - tile - 1) / (tiles - tile);
      kMultiply[height](x + row * inputs + at, inputs, weight, depth, c + row * kPanel, at == 0);
      row += height;
    }
  }
}

inline void add_bias(const Linear& linear, int64_t panel, int64_t rows, float* c) {
  if (linear.bias == nullptr) return;
  const Vec low = load(linear.bias + panel * kPanel), high = load(linear.bias + panel * kPanel + kLanes);
  for (int64_t r = 0; r < rows; ++r) {
    store(c + r * kPanel, load(c + r * kPanel) + low);
    store(c + r * kPanel + kLanes, load(c + r * kPanel + kLanes) + high);
  }
}

// One panel of outputs for all rows into c [rows][32].
void panel_product(const Linear& linear, int64_t panel, const float* x, int64_t rows, float* c, float* scratch) {
#if defined(PACELINE_BLOCKS)
  if (linear.format == 2 && rows <= kMaxRows) {
    multiply_blocks<Block4>(linear, panel, x, rows, c);
  } else if (linear.format == 3 && rows <= kMaxRows) {
    multiply_blocks<Block8>(linear, panel, x, rows, c);
  } else
#endif
  {
    panel_sums(linear, panel, x, rows, c, scratch);
  }
  add_bias(linear, panel, rows, c);
}

inline int64_t panels(const Linear& linear) { return (linear.outputs + kPanel - 1) / kPanel; }

}  // namespace
