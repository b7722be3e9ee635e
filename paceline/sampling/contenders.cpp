// Passes over a row of logits for a draw of the coupled law; see contenders.py.
//
// For each token its noise is hashed (SplitMix64, see noise.py) and U / w is estimated in float32. What this decides is only
// who is compared exactly: a relative error of 1e-4 does no harm, so the exponential is a polynomial. The comparison itself is in float64,
// operation by operation what coupled.py does in Python, with the same logarithms: compiled without fused multiply-adds.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_MACHINE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#pragma GCC optimize("no-trapping-math")  // else a comparison of floats keeps a loop out of vectors
#else
#define FOR_EACH_MACHINE
#endif

namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull, kMix1 = 0xBF58476D1CE4E5B9ull, kMix2 = 0x94D049BB133111EBull;
constexpr uint64_t kMask63 = (1ull << 63) - 1;
constexpr int32_t kPart = 256;  // entries whose words stay in the first-level cache
constexpr int32_t kWords = 4;
constexpr int32_t kNear = 256;
constexpr int32_t kLanes = 16, kFloats = 8;
constexpr int32_t kPiece = 32;  // of a row, for its largest logits
constexpr float kLeast = -87.0f;  // of a scaled logit: below it float32 has no exponential
constexpr float kLeastPower = -126.0f;
constexpr float kBinary = 1.44269504f;  // 1 / log 2
constexpr float kLeastLogit = -FLT_MAX;
constexpr double kTwoTo31 = 2147483648.0, kUnit = 1.0 / 9223372036854775808.0;

typedef uint64_t Words __attribute__((vector_size(kWords * sizeof(uint64_t))));
typedef int32_t Halves __attribute__((vector_size(kWords * sizeof(uint64_t))));
typedef float Floats __attribute__((vector_size(kFloats * sizeof(float))));
#ifdef __clang__
#define UPPER_OF(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#else
#define UPPER_OF(a, b) __builtin_shuffle(a, b, Halves{1, 3, 5, 7, 9, 11, 13, 15})
#endif

inline uint64_t bits_of(uint64_t key, uint64_t token) {
  uint64_t word = key + (token + 1) * kGolden;
  word = (word ^ (word >> 30)) * kMix1;
  word = (word ^ (word >> 27)) * kMix2;
  return (word ^ (word >> 31)) & kMask63;
}

inline float as_float(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// e^x for -87 <= x <= 0, right within 1e-6: 2^n by the exponent's bits, times a polynomial for the rest.
inline float exponential_of(float x) {
  const float scaled = x * kBinary;
  const int32_t whole = static_cast<int32_t>(scaled - 0.5f);
  const float rest = (scaled - static_cast<float>(whole)) * 0.693147181f;
  float sum = 1.0f / 720.0f;
  sum = sum * rest + 1.0f / 120.0f;
  sum = sum * rest + 1.0f / 24.0f;
  sum = sum * rest + 1.0f / 6.0f;
  sum = sum * rest + 0.5f;
  sum = sum * rest + 1.0f;
  sum = sum * rest + 1.0f;
  return sum * as_float((whole + 127) << 23);
}

inline float weight_of(float logit, float top, float scale) {
  const float x = (logit - top) * scale;
  return exponential_of(x < kLeast ? kLeast : x);
}

// The upper half of the bits of tokens first to first + count - 1 and up to seven more: 31 bits, so that eight of them fill a register.
// In vectors by name: left to itself, GCC 12 makes wrong ones of eight words side by side.
FOR_EACH_MACHINE
void upper_halves(uint64_t key, int32_t first, int32_t count, int32_t* upper) {
  const uint64_t start = key + (static_cast<uint64_t>(first) + 1) * kGolden;
  Words next = {start, start + kGolden, start + 2 * kGolden, start + 3 * kGolden};
  for (int32_t i = 0; i < count; i += 2 * kWords) {
    Halves words[2];
    for (Halves& made : words) {
      Words word = next;
      next += kWords * kGolden;
      word = (word ^ (word >> 30)) * kMix1;
      word = (word ^ (word >> 27)) * kMix2;
      made = reinterpret_cast<Halves>(word ^ (word >> 31));
    }
    const Halves halves = UPPER_OF(words[0], words[1]) & 0x7fffffff;
    std::memcpy(upper + i, &halves, sizeof halves);
  }
}

// Whether any of `count` tokens can have (bits + 1/2) / weight of at most `limit`, 2^32 being the unit of bits. Weights are taken for the
// next power of two, which is no smaller, and bits for their upper half, which is no larger: nobody is missed.
FOR_EACH_MACHINE
int32_t any_within(const float* logits, const int32_t* upper, int32_t count, float top, float scale, float limit, int32_t* within) {
  int32_t any = 0;
  for (int32_t i = 0; i < count; ++i) {
    const float x = (logits[i] - top) * scale;
    const int32_t power = static_cast<int32_t>(x < kLeastPower ? kLeastPower : x);  // towards zero, which is up
    within[i] = static_cast<float>(upper[i]) <= limit * as_float((power + 127) << 23);
    any |= within[i];
  }
  return any;
}

// Weights of tokens first to first + count - 1: all of them, and those that rank before token `edge` with logit `floor`. So few are added
// in float32 that each sum is right within 1e-5.
FOR_EACH_MACHINE
void mass_part(const float* logits, int32_t first, int32_t count, float top, float scale, float floor, int32_t edge,
               double* all, double* before) {
  float sums[kLanes] = {}, kept[kLanes] = {};
  int32_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int32_t j = 0; j < kLanes; ++j) {
      const float logit = logits[i + j], weight = weight_of(logit, top, scale);
      const bool behind = (logit < floor) | ((logit == floor) & (first + i + j >= edge));
      sums[j] += weight;
      kept[j] += behind ? 0.0f : weight;
    }
  }
  for (; i < count; ++i) {
    const float weight = weight_of(logits[i], top, scale);
    const bool behind = (logits[i] < floor) | ((logits[i] == floor) & (first + i >= edge));
    sums[0] += weight;
    kept[0] += behind ? 0.0f : weight;
  }
  for (int32_t j = 0; j < kLanes; ++j) *all += sums[j];
  for (int32_t j = 0; j < kLanes; ++j) *before += kept[j];
}

// The largest logit of each piece.
FOR_EACH_MACHINE
void largest_of(const float* logits, int32_t size, float* largest) {
  int32_t first = 0;
  for (; first + kPiece <= size; first += kPiece) {
    Floats most, next;
    std::memcpy(&most, logits + first, sizeof most);
    for (int32_t i = kFloats; i < kPiece; i += kFloats) {
      std::memcpy(&next, logits + first + i, sizeof next);
      most = most > next ? most : next;
    }
    float one = most[0];
    for (int32_t i = 1; i < kFloats; ++i) one = most[i] > one ? most[i] : one;
    *largest++ = one;
  }
  if (first < size) *largest = *std::max_element(logits + first, logits + size);
}

// The standard exponential variate of 63 bits; see noise.py.
inline double variate_of(uint64_t bits) {
  if (bits < 1ull << 62) return -std::log1p(-(static_cast<double>(bits) + 0.5) * kUnit);
  return -std::log((static_cast<double>(kMask63 - bits) + 0.5) * kUnit);
}

// Tokens that are looked at closely and kept until the limit is known.
struct Contenders {
  int64_t tokens[kNear];
  float values[kNear];  // their logits
  double bounds[kNear];  // U / w
  int32_t count = 0;

  void add(int64_t token, float value, double bound) {
    tokens[count] = token;
    values[count] = value;
    bounds[count++] = bound;
  }

  // How many are left.
  int32_t drop_beyond(double limit) {
    int32_t kept = 0;
    for (int32_t i = 0; i < count; ++i) {
      if (bounds[i] > limit) continue;
      tokens[kept] = tokens[i];
      values[kept] = values[i];
      bounds[kept++] = bounds[i];
    }
    return count = kept;
  }
};

}  // namespace

// The weight of all tokens, and of those that rank before token `edge`: by falling logit, the lower id first among equals.
extern "C" void masses_of(const float* logits, int32_t size, float top, float temperature, float floor, int32_t edge,
                          double* all, double* before) {
  const float scale = 1.0f / temperature;
  *all = *before = 0.0;
  for (int32_t first = 0; first < size; first += kPart) {
    const int32_t count = size - first < kPart ? size - first : kPart;
    mass_part(logits + first, first, count, top, scale, floor, edge, all, before);
  }
}

// Of `count` tokens with their logits, ascending: index of the one with the largest log w + g, the first among equals; -1 where none has any.
extern "C" int32_t winner_of(const float* values, const int64_t* tokens, int32_t count, double top, double temperature,
                             uint64_t key) {
  int32_t winner = -1;
  double best = -INFINITY;
  for (int32_t i = 0; i < count; ++i) {
    const double score = (static_cast<double>(values[i]) - top) / temperature - std::log(variate_of(bits_of(key, tokens[i])));
    if (score > best) {
      winner = i;
      best = score;
    }
  }
  return winner;
}

// The token that is drawn among those that rank before token `edge` with logit `floor`; -1 where too many come near. `top` is the row's
// largest logit, `slack` a factor above 1 for the rounding of the bounds, `near_1` the temperature within float32.
//
// The true E / w of any token is at least the winner's: nobody whose bound U / w is above it can win. So the least E / w up to
// here is the limit for those that follow; a cheap test leaves few to be looked at closely.
extern "C" int32_t drawn_of(const float* logits, int32_t size, float top, double temperature, float near_1, uint64_t key,
                            double slack, float floor, int32_t edge) {
  Contenders near;
  const float scale = 1.0f / near_1, binary = scale * kBinary;
  double limit = INFINITY;
  int32_t upper[kPart + 2 * kWords], within[kPart];
  for (int32_t first = 0; first < size; first += kPart) {
    const int32_t part = size - first < kPart ? size - first : kPart;
    upper_halves(key, first, part, upper);
    if (!any_within(logits + first, upper, part, top, binary, static_cast<float>(limit * kTwoTo31), within)) continue;
    for (int32_t i = 0; i < part; ++i) {
      const int32_t token = first + i;
      const float logit = logits[token];
      if (!within[i] || logit < floor || (logit == floor && token >= edge)) continue;
      const double uniform = (static_cast<double>(bits_of(key, token)) + 0.5) * kUnit;
      const double weight = weight_of(logit, top, scale);
      if (uniform > limit * weight) continue;
      if (near.count == kNear && near.drop_beyond(limit) == kNear) return -1;
      near.add(token, logit, uniform / weight);
      const double exact = -std::log1p(-uniform) / weight * slack;
      limit = exact < limit ? exact : limit;
    }
  }
  const int32_t winner = winner_of(near.values, near.tokens, near.drop_beyond(limit), top, temperature, key);
  return winner < 0 ? -1 : static_cast<int32_t>(near.tokens[winner]);
}

// Ascending tokens whose logits are the `k` largest, all that equal the last of them among them, but no impossible one; -1 where they do
// not fit into `found`, which has room for `most`.
//
// The row is looked at in small pieces: the k-th largest of their largest logits is no larger than the k-th logit, and few lie above it.
extern "C" int32_t leaders_of(const float* logits, int32_t size, int32_t k, int64_t* found, int32_t most) {
  const int32_t pieces = (size + kPiece - 1) / kPiece;
  if (k > size) return -1;
  std::vector<float> largest(pieces), above;
  largest_of(logits, size, largest.data());
  float edge = kLeastLogit;
  if (k <= pieces) {
    std::vector<float> ranked = largest;
    std::nth_element(ranked.begin(), ranked.begin() + (k - 1), ranked.end(), std::greater<float>());
    edge = std::max(edge, ranked[k - 1]);
  }
  const auto each = [&](auto&& take) {
    for (int32_t piece = 0; piece < pieces; ++piece) {
      if (largest[piece] < edge) continue;
      const int32_t last = std::min(size, (piece + 1) * kPiece);
      for (int32_t token = piece * kPiece; token < last; ++token) {
        if (logits[token] >= edge) take(token);
      }
    }
  };
  each([&](int32_t token) { above.push_back(logits[token]); });
  if (static_cast<size_t>(k) < above.size()) {
    std::nth_element(above.begin(), above.begin() + (k - 1), above.end(), std::greater<float>());
    edge = above[k - 1];
  }
  int32_t made = 0;
  each([&](int32_t token) {
    if (made < most) found[made] = token;
    ++made;
  });
  return made > most ? -1 : made;
}
