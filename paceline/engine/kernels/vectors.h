// Sixteen float32 lanes at a time, in vector types of the compiler: any processor runs them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;

using Vec = float __attribute__((vector_size(64)));
using IntVec = int32_t __attribute__((vector_size(64)));

inline Vec load(const float* from) {
  Vec value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Vec value) { std::memcpy(to, &value, sizeof value); }

// ---- float16, where the processor has it ----

using Half = uint16_t;

inline Vec widen(const float* from) { return load(from); }

#if defined(__AVX512F__)
inline Vec widen(const Half* from) { return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }

// To nearest; what is too large becomes the largest number there is, and what is none stays none.
inline void narrow(const float* from, int64_t count, Half* to) {
  const __m512 most = _mm512_set1_ps(65504.0f), least = _mm512_set1_ps(-65504.0f);
  for (int64_t i = 0; i < count; i += kLanes) {
    const __m512 bounded = _mm512_max_ps(least, _mm512_min_ps(most, _mm512_loadu_ps(from + i)));
    _mm256_storeu_si256((__m256i*)(to + i), _mm512_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
}
#else
inline Vec widen(const Half*) { return Vec{}; }
inline void narrow(const float*, int64_t, Half*) {}
#endif

inline Vec splat(float value) { return value - Vec{}; }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

inline Vec min(Vec a, Vec b) { return a < b ? a : b; }

template <int kHalf>
inline Vec fold(Vec a, Vec b);  // lanes of a and b, each added to its partner kHalf lanes away

template <>
inline Vec fold<8>(Vec a, Vec b) {
  return __builtin_shuffle(a, b, IntVec{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}) +
         __builtin_shuffle(a, b, IntVec{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
}
template <>
inline Vec fold<4>(Vec a, Vec b) {
  return __builtin_shuffle(a, b, IntVec{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}) +
         __builtin_shuffle(a, b, IntVec{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
}
template <>
inline Vec fold<2>(Vec a, Vec b) {
  return __builtin_shuffle(a, b, IntVec{0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29}) +
         __builtin_shuffle(a, b, IntVec{2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31});
}
template <>
inline Vec fold<1>(Vec a, Vec b) {
  return __builtin_shuffle(a, b, IntVec{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}) +
         __builtin_shuffle(a, b, IntVec{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
}

inline float sum(Vec v) {
  v = fold<8>(v, v);
  v = fold<4>(v, v);
  v = fold<2>(v, v);
  return fold<1>(v, v)[0];
}

inline float highest(Vec v) {
  float found = v[0];
  for (int i = 1; i < kLanes; ++i) found = v[i] > found ? v[i] : found;
  return found;
}

// e^x to about one unit in the last place; x beyond what float32 can hold counts as its edge.
inline Vec exponential(Vec x) {
  x = min(max(x, splat(-87.0f)), splat(88.0f));
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, kept in the low bits
  const Vec shifted = fma(x, splat(1.44269504088896341f), magic);
  const Vec whole = shifted - magic;
  Vec rest = fma(whole, splat(-0.693359375f), x);
  rest = fma(whole, splat(2.12194440e-4f), rest);
  Vec value = splat(1.9875691500e-4f);
  value = fma(value, rest, splat(1.3981999507e-3f));
  value = fma(value, rest, splat(8.3334519073e-3f));
  value = fma(value, rest, splat(4.1665795894e-2f));
  value = fma(value, rest, splat(1.6666665459e-1f));
  value = fma(value, rest, splat(5.0000001201e-1f));
  value = fma(value, rest * rest, rest) + splat(1.0f);
  return (Vec)((IntVec)value + ((IntVec)shifted << 23));
}

inline Vec silu(Vec x) { return x / (splat(1.0f) + exponential(splat(0.0f) - x)); }

}  // namespace
