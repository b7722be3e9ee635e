// Passes over a row of logits for a draw of the coupled law; see contenders.py.
//
// For each token its noise is hashed (SplitMix64, see noise.py) and U / w is computed in float32. What this decides is only
// who is compared exactly, on the host, in float64: a relative error of 1e-4 does no harm, so the exponential is a polynomial.

#include <cmath>
#include <cstdint>
#include <cstring>
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
constexpr int32_t kPart = 1024;  // entries whose words stay in the first-level cache
constexpr int32_t kLanes = 16;
constexpr float kLeast = -87.0f;  // of a scaled logit: below it float32 has no exponential

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

inline int32_t as_bits(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// e^x for -87 <= x <= 0, right within 1e-6: 2^n by the exponent's bits, times a polynomial for the rest.
inline float exponential_of(float x) {
  const float scaled = x * 1.44269504f;
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

// (bits + 1/2) / weight of tokens first to first + count - 1, infinite for those that rank at or behind token `edge` with logit
// `floor`; gives the bits of the smallest. Positive floats are in the order of their bits, and a smallest integer is found in vectors.
FOR_EACH_MACHINE
int32_t bound_part(const float* logits, int32_t first, int32_t count, float top, float scale, uint64_t key, float floor,
                   int32_t edge, float* bounds) {
  float drawn[kPart];
  for (int32_t i = 0; i < count; ++i) drawn[i] = static_cast<float>(static_cast<int64_t>(bits_of(key, first + i)));
  for (int32_t i = 0; i < count; ++i) bounds[i] = (drawn[i] + 0.5f) / weight_of(logits[i], top, scale);
  for (int32_t i = 0; i < count; ++i) {
    const bool behind = (logits[i] < floor) | ((logits[i] == floor) & (first + i >= edge));
    bounds[i] = behind ? INFINITY : bounds[i];
  }
  int32_t least = INT32_MAX;
  for (long i = 0; i < count; ++i) {
    const int32_t bound = as_bits(bounds[i]);
    least = bound < least ? bound : least;
  }
  return least;
}

FOR_EACH_MACHINE
int32_t count_at_most(const float* bounds, int32_t count, float limit) {
  int32_t found = 0;
  for (int32_t i = 0; i < count; ++i) found += bounds[i] <= limit;
  return found;
}

// Weights of tokens first to first + count - 1: all of them, and those that rank before token `edge` with logit `floor`.
FOR_EACH_MACHINE
void mass_part(const float* logits, int32_t first, int32_t count, float top, float scale, float floor, int32_t edge,
               double* all, double* before) {
  float weights[kPart + kLanes] = {}, kept[kPart + kLanes] = {};
  for (int32_t i = 0; i < count; ++i) {
    const float weight = weight_of(logits[i], top, scale);
    const bool behind = (logits[i] < floor) | ((logits[i] == floor) & (first + i >= edge));
    weights[i] = weight;
    kept[i] = behind ? 0.0f : weight;
  }
  double sums[kLanes] = {}, kept_sums[kLanes] = {};
  for (int32_t i = 0; i < count; i += kLanes) {
    for (int32_t j = 0; j < kLanes; ++j) sums[j] += weights[i + j];
    for (int32_t j = 0; j < kLanes; ++j) kept_sums[j] += kept[i + j];
  }
  for (int32_t j = 0; j < kLanes; ++j) *all += sums[j];
  for (int32_t j = 0; j < kLanes; ++j) *before += kept_sums[j];
}

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

// Tokens that can win among those that rank before token `edge` with logit `floor`, ascending, into `found` (room for `most`);
// gives how many there are, or -1 where they do not fit. `top` is the row's largest logit, `slack` a factor above 1 for the
// rounding of the bounds.
extern "C" int32_t contenders_of(const float* logits, int32_t size, float top, float temperature, uint64_t key, double slack,
                                 float floor, int32_t edge, int64_t* found, int32_t most) {
  thread_local std::vector<float> bounds;
  if (bounds.size() < static_cast<size_t>(size)) bounds.resize(size);
  const float scale = 1.0f / temperature;
  int32_t least_bits = INT32_MAX;
  for (int32_t first = 0; first < size; first += kPart) {
    const int32_t count = size - first < kPart ? size - first : kPart;
    const int32_t of_part = bound_part(logits + first, first, count, top, scale, key, floor, edge, bounds.data() + first);
    least_bits = of_part < least_bits ? of_part : least_bits;
  }
  const float least = as_float(least_bits);
  int32_t winner = 0;
  while (winner < size && bounds[winner] != least) ++winner;
  if (winner == size) return -1;
  // The true E / w of that token is at least the winner's: nobody whose bound is above it can win.
  const uint64_t bits = bits_of(key, winner);
  const double uniform = (static_cast<double>(bits) + 0.5) / 9223372036854775808.0;
  const float limit = static_cast<float>(least * (-std::log1p(-uniform) / uniform) * slack);
  int32_t made = 0;
  for (int32_t first = 0; first < size; first += kPart) {
    const int32_t count = size - first < kPart ? size - first : kPart;
    if (!count_at_most(bounds.data() + first, count, limit)) continue;
    for (int32_t i = first; i < first + count; ++i) {
      if (bounds[i] > limit) continue;
      if (made == most) return -1;
      found[made++] = i;
    }
  }
  return made;
}
