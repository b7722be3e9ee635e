// Sixteen float32 lanes at a time, lane by lane the same operations in the same order on any processor, and so the same bits.
//
// Reg is what a register holds, sixteen lanes or eight: inner loops keep their sums in it. Vec is always sixteen.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;

using Eight = float __attribute__((vector_size(32)));
using IntEight = int32_t __attribute__((vector_size(32)));
using Four = float __attribute__((vector_size(16)));
using Half = uint16_t;  // float16

#if defined(__AVX512F__)
using Vec = float __attribute__((vector_size(64)));
using IntVec = int32_t __attribute__((vector_size(64)));
using Reg = Vec;
constexpr int kSums = 24;  // registers for sums: the others hold what is multiplied

inline Reg fma(Reg a, Reg b, Reg c) { return (Reg)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline Reg widen(const Half* from) { return (Reg)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
#else
using Reg = Eight;
constexpr int kSums = 12;

inline Reg fma(Reg a, Reg b, Reg c) {
#if defined(__FMA__)
  return (Reg)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;  // one operation where the compiler may make it one, as it is told to
#endif
}

#if defined(__F16C__)
inline Reg widen(const Half* from) { return (Reg)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
#else
inline Reg widen(const Half*) { return Reg{}; }
#endif
#endif

// Reads it into a register once, where the compiler would read it anew for each product: AVX2 has two reads a cycle and few registers.
inline void hold(Reg& value) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm("" : "+x"(value));
#endif
}

constexpr int kReg = sizeof(Reg) / sizeof(float);
constexpr int kRegs = kLanes / kReg;  // of a Vec

inline Reg load_reg(const float* from) {
  Reg value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Reg value) { std::memcpy(to, &value, sizeof value); }

inline Reg splat_reg(float value) { return value - Reg{}; }

inline Reg widen(const float* from) { return load_reg(from); }

template <typename Kind>
inline void widen(const Kind* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kReg) store(to + i, widen(from + i));
}

#if defined(__AVX512F__)
inline Vec load(const float* from) { return load_reg(from); }

inline Vec select(IntVec which, Vec a, Vec b) { return which ? a : b; }
inline IntVec select(IntVec which, IntVec a, IntVec b) { return which ? a : b; }

inline Vec splat(float value) { return splat_reg(value); }
inline IntVec splat(int32_t value) { return value - IntVec{}; }

inline IntVec to_bits(Vec value) { return (IntVec)value; }
inline Vec from_bits(IntVec bits) { return (Vec)bits; }
#else
// What the compiler makes of vectors that no register holds lives in memory, so the halves are told apart.
template <typename Part>
struct Two {
  Part low, high;

  Two& operator+=(Two other) { return *this = *this + other; }
  Two& operator|=(Two other) { return *this = *this | other; }
  auto operator[](int lane) const { return lane < kLanes / 2 ? low[lane] : high[lane - kLanes / 2]; }

  friend Two operator+(Two a, Two b) { return {a.low + b.low, a.high + b.high}; }
  friend Two operator-(Two a, Two b) { return {a.low - b.low, a.high - b.high}; }
  friend Two operator*(Two a, Two b) { return {a.low * b.low, a.high * b.high}; }
  friend Two operator/(Two a, Two b) { return {a.low / b.low, a.high / b.high}; }
  friend Two operator&(Two a, Two b) { return {a.low & b.low, a.high & b.high}; }
  friend Two operator|(Two a, Two b) { return {a.low | b.low, a.high | b.high}; }
  friend Two operator<<(Two a, int bits) { return {a.low << bits, a.high << bits}; }
};

using Vec = Two<Eight>;
using IntVec = Two<IntEight>;

template <typename Part>
inline IntVec operator<(Two<Part> a, Two<Part> b) { return {a.low < b.low, a.high < b.high}; }
template <typename Part>
inline IntVec operator>(Two<Part> a, Two<Part> b) { return {a.low > b.low, a.high > b.high}; }
template <typename Part>
inline IntVec operator==(Two<Part> a, Two<Part> b) { return {a.low == b.low, a.high == b.high}; }
template <typename Part>
inline IntVec operator!=(Two<Part> a, Two<Part> b) { return {a.low != b.low, a.high != b.high}; }

inline Vec fma(Vec a, Vec b, Vec c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }

template <typename Part>
inline Two<Part> select(IntVec which, Two<Part> a, Two<Part> b) {
  return {which.low ? a.low : b.low, which.high ? a.high : b.high};
}

inline Vec splat(float value) { return {value - Eight{}, value - Eight{}}; }
inline IntVec splat(int32_t value) { return {value - IntEight{}, value - IntEight{}}; }

inline Vec load(const float* from) { return {load_reg(from), load_reg(from + kReg)}; }

inline void store(float* to, Vec value) {
  store(to, value.low);
  store(to + kReg, value.high);
}

inline IntVec to_bits(Vec value) { return {(IntEight)value.low, (IntEight)value.high}; }
inline Vec from_bits(IntVec bits) { return {(Eight)bits.low, (Eight)bits.high}; }
#endif

// 0 to 15, each in its lane.
inline IntVec places() {
  constexpr int32_t kPlaces[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  IntVec value;
  std::memcpy(&value, kPlaces, sizeof value);
  return value;
}

#if defined(__F16C__)
// To nearest; what is too large becomes the largest number there is, and what is none stays none.
inline void narrow(const float* from, int64_t count, Half* to) {
  const __m256 most = _mm256_set1_ps(65504.0f), least = _mm256_set1_ps(-65504.0f);
  for (int64_t i = 0; i < count; i += kLanes / 2) {
    const __m256 bounded = _mm256_max_ps(least, _mm256_min_ps(most, _mm256_loadu_ps(from + i)));
    _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
}
#else
inline void narrow(const float*, int64_t, Half*) {}
#endif

inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }

inline Vec min(Vec a, Vec b) { return select(a < b, a, b); }

// Lanes are added to those eight away, these sums to those four away, and so on.
inline float sum(Vec v) {
  Eight halves[2];
  std::memcpy(halves, &v, sizeof v);
  const Eight eight = halves[0] + halves[1];
  Four quarters[2];
  std::memcpy(quarters, &eight, sizeof eight);
  const Four four = quarters[0] + quarters[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float highest(Vec v) {
  float found = v[0];
  for (int i = 1; i < kLanes; ++i) found = v[i] > found ? v[i] : found;
  return found;
}

// e^x to about one unit in the last place; x beyond what float32 can hold counts as its edge, and what is no number stays none:
// of their two arguments, `max` and `min` give the second where one is none.
inline Vec exponential(Vec x) {
  x = min(splat(88.0f), max(splat(-87.0f), x));
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
  return from_bits(to_bits(value) + (to_bits(shifted) << 23));
}

inline Vec silu(Vec x) { return x / (splat(1.0f) + exponential(splat(0.0f) - x)); }

}  // namespace
