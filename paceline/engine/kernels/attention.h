// Attention: a few consecutive rows of one sequence, kGroup query heads over the keys and values of a KV head.
//
// Keys lie in blocks of sixteen positions, [dimension][position] within a KV head: one instruction takes a number of sixteen keys,
// and no sum runs across lanes. A score is one chain over the dimensions, an output one chain over the positions. Rows share
// what is read, not arithmetic: each has the same operations in the same order as alone.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "ahead.h"
#include "vectors.h"

namespace {

constexpr int kTile = 8;           // most rows
constexpr int kBlocks = 4 / kRegs;  // of keys at a time: as many chains as keep both multipliers busy, and no more than there are registers
constexpr int64_t kStretch = kBlocks * kLanes;  // positions whose keys, or values, stay in the first cache while all rows pass over them
constexpr int64_t kAskEvery = 4;   // dimensions
constexpr int64_t kWeightsEvery = 16;
constexpr int64_t kAsked = 11 * kWeightsEvery * kBlocks / 64;  // lines of weights asked for so often beside a head's scores

struct Look {
  const float* query;  // [rows][query_stride], the group's heads one behind the other
  const void* keys;    // of the KV head's first block; blocks kLanes * kv_stride apart, float32 or float16
  const void* values;  // of position 0; [positions][kv_stride]
  float* widened;      // [kStretch][head size]: room for what was float16
  float* scores;       // [rows][row_scores], of the group's heads scores_stride apart
  float* out;          // [rows][out_stride]
  int64_t query_stride, kv_stride, row_scores, scores_stride, out_stride;
  int64_t rows;
  int64_t length;  // of the first row; each further row sees one position more
  float scaling;
  Ahead* ahead;

  int64_t last() const { return length + rows - 1; }
};

inline int64_t blocks_of(int64_t length) { return (length + kLanes - 1) / kLanes; }

// The keys of the next stretch and the values of this one, asked for a little at a time: asking for much at once waits for it.
template <typename Kept, int kVecs>
class Soon {
 public:
  Soon(const Look& look, int64_t first) {
    const int64_t block_stride = kLanes * look.kv_stride, left = blocks_of(look.last()) - first - kBlocks;
    key_ = static_cast<const Kept*>(look.keys) + (first + kBlocks) * block_stride;
    value_ = static_cast<const Kept*>(look.values) + first * kLanes * look.kv_stride;
    block_stride_ = block_stride;
    stride_ = look.kv_stride;
    blocks_ = std::clamp<int64_t>(left, 0, kBlocks);
    values_ = std::min(kStretch, look.last() - first * kLanes);
  }

  // As much as is computed with `dims` dimensions of the stretch.
  void ask(int64_t dims) {
    constexpr int64_t kLine = 64 / sizeof(Kept), kDims = kVecs * kLanes;
    const int64_t numbers = dims * kLanes, positions = (dims * kStretch + kDims - 1) / kDims;
    for (int64_t b = 0; b < blocks_; ++b) {
      for (int64_t i = 0; i < numbers; i += kLine) __builtin_prefetch(key_ + b * block_stride_ + i);
    }
    key_ += numbers;
    for (int64_t j = 0; j < positions && values_ > 0; ++j, --values_, value_ += stride_) {
      for (int64_t i = 0; i < kDims; i += kLine) __builtin_prefetch(value_ + i);
    }
  }

 private:
  const Kept *key_, *value_;
  int64_t block_stride_, stride_, blocks_, values_;
};

// kCount blocks of keys, block_stride apart, against a row's kGroup query heads. kAsks: and asks for what comes soon.
template <int kGroup, int kCount, bool kAsks, typename Kind, typename Soon>
inline void score(const float* query, int64_t size, const Kind* keys, int64_t block_stride, const Look& look, float* scores,
                  Soon& soon) {
  constexpr int kKeys = kCount * kRegs;
  Reg total[kGroup][kKeys] = {};
  for (int64_t from = 0; from < size; from += kAskEvery) {
    if (kAsks) soon.ask(kAskEvery);
    if (from % kWeightsEvery == 0) look.ahead->ask(kAsked * kGroup);
    for (int64_t d = from; d < from + kAskEvery; ++d) {
      Reg numbers[kGroup];
#pragma GCC unroll 4
      for (int g = 0; g < kGroup; ++g) numbers[g] = splat_reg(query[g * size + d]);
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; ++i) {
        Reg key = widen(keys + i / kRegs * block_stride + d * kLanes + i % kRegs * kReg);
        hold(key);
#pragma GCC unroll 4
        for (int g = 0; g < kGroup; ++g) total[g][i] = fma(numbers[g], key, total[g][i]);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kGroup; ++g) {
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) store(scores + g * look.scores_stride + i * kReg, total[g][i] * splat_reg(look.scaling));
  }
}

// A row's scores over `count` blocks of keys.
template <int kGroup, bool kAsks, typename Kind, typename Soon>
inline void score(const float* query, int64_t size, const Kind* keys, int64_t block_stride, int64_t count, const Look& look,
                  float* scores, Soon& soon) {
  switch (count) {
#if defined(__AVX512F__)
    case 4: score<kGroup, 4, kAsks>(query, size, keys, block_stride, look, scores, soon); break;
    case 3: score<kGroup, 3, kAsks>(query, size, keys, block_stride, look, scores, soon); break;
#endif
    case 2: score<kGroup, 2, kAsks>(query, size, keys, block_stride, look, scores, soon); break;
    case 1: score<kGroup, 1, kAsks>(query, size, keys, block_stride, look, scores, soon); break;
    default: break;  // the row ends before
  }
}

// Scores of all rows over the blocks of keys from `first` (a multiple of kBlocks) to `end`.
template <typename Kept, int kVecs, int kGroup>
void score_rows(const Look& look, int64_t first, int64_t end) {
  constexpr int64_t kSize = kVecs * kLanes;
  const int64_t block_stride = kLanes * look.kv_stride;
  const bool widens = !std::is_same<Kept, float>::value && look.rows > 2;  // once for all rows
  for (; first < end; first += kBlocks) {
    const int64_t count = std::min<int64_t>(kBlocks, end - first);
    const Kept* keys = static_cast<const Kept*>(look.keys) + first * block_stride;
    Soon<Kept, kVecs> soon(look, first);
    if (widens) {
      for (int64_t d = 0; d < kSize; ++d) {
        soon.ask(1);
        for (int64_t b = 0; b < count; ++b) {
          widen(keys + b * block_stride + d * kLanes, kLanes, look.widened + (b * kSize + d) * kLanes);
        }
      }
    }
    for (int64_t r = 0; r < look.rows; ++r) {
      const float* query = look.query + r * look.query_stride;
      float* scores = look.scores + r * look.row_scores + first * kLanes;
      const int64_t own = std::min(count, blocks_of(look.length + r) - first);
      if (widens) {
        score<kGroup, false>(query, kSize, look.widened, kSize * kLanes, own, look, scores, soon);
      } else if (r == 0) {
        score<kGroup, true>(query, kSize, keys, block_stride, own, look, scores, soon);
      } else {
        score<kGroup, false>(query, kSize, keys, block_stride, own, look, scores, soon);
      }
    }
  }
}

// Scores to weights e^(score - highest); returns what to divide by. Positions from `length` on are replaced, never added: what lies
// there may be no number.
inline float weigh(float* scores, int64_t length) {
  const int64_t blocks = blocks_of(length);
  float* end = scores + (blocks - 1) * kLanes;
  const IntVec seen = places() < splat(static_cast<int32_t>(length - (blocks - 1) * kLanes));
  store(end, select(seen, load(end), splat(-INFINITY)));
  Vec best = splat(-INFINITY);
  for (int64_t block = 0; block < blocks; ++block) best = max(best, load(scores + block * kLanes));
  const Vec top = splat(highest(best));
  Vec weights{};
  for (int64_t block = 0; block < blocks; ++block) {
    const Vec score = load(scores + block * kLanes);
    const Vec weight = select(score == splat(-INFINITY), Vec{}, exponential(score - top));
    weights += weight;
    store(scores + block * kLanes, weight);
  }
  return sum(weights);
}

// out += weights of positions `from` .. `to` times their values, of which the first is that of `from`, in ascending order: numbers
// kFirst and on, as many as their sums have registers for.
template <int kSize, int kGroup, int kFirst = 0, typename Kind>
inline void gather(const float* weights, int64_t weights_stride, const Kind* values, int64_t stride, int64_t from,
                   int64_t to, float* out) {
  constexpr int kCount = std::min((kSize - kFirst) / kReg, std::max(kSums / kGroup, 1)), kNext = kFirst + kCount * kReg;
  Reg total[kGroup][kCount];
#pragma GCC unroll 4
  for (int g = 0; g < kGroup; ++g) {
#pragma GCC unroll 24
    for (int i = 0; i < kCount; ++i) total[g][i] = from == 0 ? Reg{} : load_reg(out + g * kSize + kFirst + i * kReg);
  }
  for (int64_t j = from; j < to; ++j) {
    const Kind* value = values + (j - from) * stride + kFirst;
    Reg shares[kGroup];
#pragma GCC unroll 4
    for (int g = 0; g < kGroup; ++g) shares[g] = splat_reg(weights[g * weights_stride + j]);
#pragma GCC unroll 24
    for (int i = 0; i < kCount; ++i) {
      Reg part = widen(value + i * kReg);
      hold(part);
#pragma GCC unroll 4
      for (int g = 0; g < kGroup; ++g) total[g][i] = fma(shares[g], part, total[g][i]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kGroup; ++g) {
#pragma GCC unroll 24
    for (int i = 0; i < kCount; ++i) store(out + g * kSize + kFirst + i * kReg, total[g][i]);
  }
  if constexpr (kNext < kSize) gather<kSize, kGroup, kNext>(weights, weights_stride, values, stride, from, to, out);
}

// From the scores of all rows to what they take from the values.
template <typename Kept, int kVecs, int kGroup>
void gather_rows(const Look& look) {
  constexpr int64_t kSize = kVecs * kLanes;
  const bool widens = !std::is_same<Kept, float>::value && look.rows > 2;
  float divisors[kTile][kGroup];
  for (int64_t r = 0; r < look.rows; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroup; ++g) {
      divisors[r][g] = weigh(look.scores + r * look.row_scores + g * look.scores_stride, look.length + r);
    }
  }
  for (int64_t from = 0; from < look.last(); from += kStretch) {
    const Kept* values = static_cast<const Kept*>(look.values) + from * look.kv_stride;
    if (widens) {
      for (int64_t j = 0; j < std::min(kStretch, look.last() - from); ++j) {
        widen(values + j * look.kv_stride, kSize, look.widened + j * kSize);
      }
    }
    for (int64_t r = 0; r < look.rows; ++r) {
      const int64_t to = std::min(from + kStretch, look.length + r);
      if (from >= to) continue;
      const float* weights = look.scores + r * look.row_scores;
      float* out = look.out + r * look.out_stride;
      if (widens) {
        gather<kSize, kGroup>(weights, look.scores_stride, look.widened, kSize, from, to, out);
      } else {
        gather<kSize, kGroup>(weights, look.scores_stride, values, look.kv_stride, from, to, out);
      }
    }
  }
  for (int64_t r = 0; r < look.rows; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroup; ++g) {
      float* out = look.out + r * look.out_stride + g * kSize;
      const Reg inverse = splat_reg(1.0f / divisors[r][g]);
      for (int64_t i = 0; i < kSize; i += kReg) store(out + i, load_reg(out + i) * inverse);
    }
  }
}

// The two halves of attention for one size and kind.
struct Attention {
  void (*score)(const Look&, int64_t, int64_t) = nullptr;
  void (*gather)(const Look&) = nullptr;
};

template <typename Kept, int kVecs>
Attention attention_for(int group) {
  switch (group) {
    case 1: return {score_rows<Kept, kVecs, 1>, gather_rows<Kept, kVecs, 1>};
    case 2: return {score_rows<Kept, kVecs, 2>, gather_rows<Kept, kVecs, 2>};
    case 3: return {score_rows<Kept, kVecs, 3>, gather_rows<Kept, kVecs, 3>};
    default: return {score_rows<Kept, kVecs, 4>, gather_rows<Kept, kVecs, 4>};
  }
}

template <typename Kept>
Attention attention_for(int64_t head_size, int group) {
  switch (head_size) {
    case 16: return attention_for<Kept, 1>(group);
    case 32: return attention_for<Kept, 2>(group);
    case 48: return attention_for<Kept, 3>(group);
    case 64: return attention_for<Kept, 4>(group);
    case 80: return attention_for<Kept, 5>(group);
    case 96: return attention_for<Kept, 6>(group);
    case 112: return attention_for<Kept, 7>(group);
    case 128: return attention_for<Kept, 8>(group);
    case 256: return attention_for<Kept, 16>(group);
    default: return {};
  }
}

}  // namespace
