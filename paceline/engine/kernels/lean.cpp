// The whole forward of a Llama-shaped decoder on a CPU, in float32, behind a plain C interface (ctypes; see native.py).
//
// One rule shapes all of it: the arithmetic of a row depends on that row alone. Every output number is made by one
// thread, as one chain of fused multiply-adds in a fixed order; how many rows share the call, which thread takes a
// piece and how many threads there are changes when a number is computed, never how.
//
// Work is cut into phases of tasks (a panel of 32 outputs, a row, a row and KV head). Threads claim tasks from a
// counter, and a phase is over when its tasks are done, not when all threads have arrived: a thread that lost its core
// to somebody else delays nobody unless it holds a task.
//
// Weights of a linear layer lie in panels of 32 outputs: [panel][input][32].

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kPanel = 2 * kLanes;
constexpr int kDepth = 192;  // inputs of a panel that stay in the first cache while all rows pass over them
constexpr int kAhead = 32;  // inputs that are asked for in advance: with several rows the processor's own guess is late

#if defined(__AVX512F__)
constexpr int kMaxRows = 12;  // 24 sums and 2 weights fit into 32 registers
#else
constexpr int kMaxRows = 4;
#endif

using Vec = float __attribute__((vector_size(64)));
using IntVec = int32_t __attribute__((vector_size(64)));

inline Vec load(const float* from) {
  Vec value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Vec value) { std::memcpy(to, &value, sizeof value); }

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

// Lane i of the result is the sum of all lanes of v[i].
inline Vec sums(Vec (&v)[16]) {
  for (int i = 0; i < 8; ++i) v[i] = fold<8>(v[2 * i], v[2 * i + 1]);
  for (int i = 0; i < 4; ++i) v[i] = fold<4>(v[2 * i], v[2 * i + 1]);
  for (int i = 0; i < 2; ++i) v[i] = fold<2>(v[2 * i], v[2 * i + 1]);
  return fold<1>(v[0], v[1]);
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

// ---- What Python hands over. The layouts are mirrored in native.py. ----

extern "C" {

struct Linear {
  const void* weight;  // panels
  const float* bias;   // [padded outputs], or null
  int64_t inputs;
  int64_t outputs;  // those that exist; the last panel may be padded
  int64_t format;   // 0: float32, 1: bfloat16, 2: blocks of 4 bits, 3: blocks of 8 bits
};

struct Layer {
  const float* attention_norm;
  const float* mlp_norm;
  const float* query_norm;  // null: none
  const float* key_norm;
  Linear qkv;
  Linear attention_out;
  Linear gate_up;  // 16 gates, the 16 ups that belong to them, 16 gates, ...
  Linear down;
};

struct Model {
  const Layer* layers;
  const float* final_norm;
  const float* cosines;  // [positions, head size / 2]
  const float* sines;
  Linear head;
  int64_t num_layers;
  int64_t hidden;
  int64_t intermediate;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_size;
  float epsilon;
  float scaling;  // of attention scores
};

struct Batch {
  float* hidden;             // [rows, hidden]: embeddings on entry
  const int64_t* positions;  // [rows]
  const int64_t* slot_rows;  // [rows]: storage row of position 0 of the row's sequence
  const int64_t* wanted;     // [num_wanted]: rows whose logits are wanted
  float* logits;             // [num_wanted, outputs of the head]
  float* keys;               // [layers, storage rows, KV heads * head size]
  float* values;
  int64_t storage_rows;
  int64_t rows;
  int64_t num_wanted;
  int64_t num_layers;  // the first so many, at most the model's
};

}  // extern "C"

namespace {

// ---- Threads ----

struct alignas(64) Phase {
  std::atomic<int64_t> next{0};
  char apart[56];
  std::atomic<int64_t> done{0};
};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Phases {
 public:
  void reset(size_t count) {
    if (count > size_) {
      phases_.reset(new Phase[count]);
      size_ = count;
    }
    for (size_t i = 0; i < count; ++i) {
      phases_[i].next.store(0, std::memory_order_relaxed);
      phases_[i].done.store(0, std::memory_order_relaxed);
    }
  }

  // Runs task(i) for i < count, shared among the threads; before the first one this thread takes, prepare().
  template <typename Prepare, typename Task>
  void run(int64_t& at, int64_t count, Prepare&& prepare, Task&& task) {
    Phase& phase = phases_[at++];
    bool prepared = false;
    for (;;) {
      const int64_t i = phase.next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) break;
      if (!prepared) {
        prepare();
        prepared = true;
      }
      task(i);
      phase.done.fetch_add(1, std::memory_order_release);
    }
    for (int spins = 0; phase.done.load(std::memory_order_acquire) < count; ++spins) {
      if (spins < 4000) {
        relax();
      } else {
        sched_yield();  // the core of whoever holds the task is wanted elsewhere: do not make it worse
      }
    }
  }

  template <typename Task>
  void run(int64_t& at, int64_t count, Task&& task) {
    run(at, count, [] {}, task);
  }

 private:
  std::unique_ptr<Phase[]> phases_;
  size_t size_ = 0;
};

// Threads that help the caller for as long as it has a job open.
class Workers {
 public:
  explicit Workers(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this, i] { live(i + 1); });
  }

  ~Workers() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int count() const { return static_cast<int>(threads_.size()); }

  void run(const std::function<void(int)>& job) {
    if (!threads_.empty()) {
      {
        std::lock_guard<std::mutex> hold(mutex_);
        job_ = &job;
        ++number_;
      }
      wake_.notify_all();
    }
    job(0);
    if (!threads_.empty()) {
      std::unique_lock<std::mutex> hold(mutex_);
      job_ = nullptr;  // who has not woken by now is not needed
      idle_.wait(hold, [this] { return active_ == 0; });
    }
  }

 private:
  void live(int index) {
    std::unique_lock<std::mutex> hold(mutex_);
    int64_t seen = 0;
    for (;;) {
      wake_.wait(hold, [&] { return ending_ || (job_ != nullptr && number_ != seen); });
      if (ending_) return;
      seen = number_;
      const auto* job = job_;
      ++active_;
      hold.unlock();
      (*job)(index);
      hold.lock();
      if (--active_ == 0) idle_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  const std::function<void(int)>* job_ = nullptr;
  int64_t number_ = 0;
  int active_ = 0;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

// ---- Linear layers ----

// c[r][0..31] += x[r][0..depth) times weight[0..depth)[0..31]; from zero when `first`.
template <int kRows>
void multiply(const float* x, int64_t stride, const float* weight, int64_t depth, float* c, bool first) {
  Vec total[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    total[r][0] = first ? Vec{} : load(c + r * kPanel);
    total[r][1] = first ? Vec{} : load(c + r * kPanel + kLanes);
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Vec low = load(weight + k * kPanel), high = load(weight + k * kPanel + kLanes);
    __builtin_prefetch(weight + (k + kAhead) * kPanel);
    __builtin_prefetch(weight + (k + kAhead) * kPanel + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Vec value = splat(x[r * stride + k]);
      total[r][0] = fma(value, low, total[r][0]);
      total[r][1] = fma(value, high, total[r][1]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    store(c + r * kPanel, total[r][0]);
    store(c + r * kPanel + kLanes, total[r][1]);
  }
}

using Multiply = void (*)(const float*, int64_t, const float*, int64_t, float*, bool);

constexpr Multiply kMultiply[] = {
    nullptr, multiply<1>, multiply<2>, multiply<3>, multiply<4>,
#if defined(__AVX512F__)
    multiply<5>, multiply<6>, multiply<7>, multiply<8>, multiply<9>, multiply<10>, multiply<11>, multiply<12>,
#endif
};

constexpr int64_t kBlock = 32;  // inputs that share a scale

#if defined(__AVX512F__)
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

inline __m512 half_to_float(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Gives the 32 weights of one input after the other.
class Reader4 {
 public:
  explicit Reader4(const Block4& block)
      : block_(block),
        low_scale_(half_to_float(block.scale)),
        high_scale_(half_to_float(block.scale + kLanes)),
        low_minimum_(half_to_float(block.minimum)),
        high_minimum_(half_to_float(block.minimum + kLanes)) {}

  void read(int64_t k, Vec& low, Vec& high) const {
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block_.q[k])));
    const __m512 low_q = _mm512_permutexvar_ps(both, table);  // looks at the lowest four bits only
    const __m512 high_q = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), table);
    low = (Vec)_mm512_fmadd_ps(low_q, low_scale_, low_minimum_);
    high = (Vec)_mm512_fmadd_ps(high_q, high_scale_, high_minimum_);
  }

 private:
  const Block4& block_;
  __m512 low_scale_, high_scale_, low_minimum_, high_minimum_;
};

class Reader8 {
 public:
  explicit Reader8(const Block8& block)
      : block_(block), low_scale_(half_to_float(block.scale)), high_scale_(half_to_float(block.scale + kLanes)) {}

  void read(int64_t k, Vec& low, Vec& high) const {
    const __m128i* q = reinterpret_cast<const __m128i*>(block_.q[k]);
    low = (Vec)_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q))), low_scale_);
    high = (Vec)_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q + 1))), high_scale_);
  }

 private:
  const Block8& block_;
  __m512 low_scale_, high_scale_;
};

inline Reader4 reader(const Block4& block) { return Reader4(block); }
inline Reader8 reader(const Block8& block) { return Reader8(block); }

template <typename Block>
inline void prefetch(const Block* block) {
  for (size_t byte = 0; byte < sizeof(Block); byte += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(block) + byte);
  }
}

// The product of a whole panel with a few rows: the weights never leave the registers.
template <typename Block, int kRows>
void multiply_blocks(const float* x, int64_t stride, const Block* blocks, int64_t count, float* c) {
  Vec total[kRows][2] = {};
  for (int64_t b = 0; b < count; ++b) {
    prefetch(blocks + b + 4);
    const auto weights = reader(blocks[b]);
    for (int64_t k = 0; k < kBlock; ++k) {
      Vec low, high;
      weights.read(k, low, high);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const Vec value = splat(x[r * stride + b * kBlock + k]);
        total[r][0] = fma(value, low, total[r][0]);
        total[r][1] = fma(value, high, total[r][1]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    store(c + r * kPanel, total[r][0]);
    store(c + r * kPanel + kLanes, total[r][1]);
  }
}

template <typename Block>
void multiply_blocks(const Linear& linear, int64_t panel, const float* x, int64_t rows, float* c) {
  constexpr void (*kKernels[])(const float*, int64_t, const Block*, int64_t, float*) = {
      nullptr,
      multiply_blocks<Block, 1>, multiply_blocks<Block, 2>, multiply_blocks<Block, 3>, multiply_blocks<Block, 4>,
      multiply_blocks<Block, 5>, multiply_blocks<Block, 6>, multiply_blocks<Block, 7>, multiply_blocks<Block, 8>,
      multiply_blocks<Block, 9>, multiply_blocks<Block, 10>, multiply_blocks<Block, 11>, multiply_blocks<Block, 12>,
  };
  const int64_t count = linear.inputs / kBlock;
  kKernels[rows](x, linear.inputs, static_cast<const Block*>(linear.weight) + panel * count, count, c);
}

template <typename Block>
const float* expand_blocks(const Linear& linear, int64_t panel, int64_t at, int64_t depth, float* scratch) {
  const Block* from = static_cast<const Block*>(linear.weight) + (panel * linear.inputs + at) / kBlock;
  for (int64_t i = 0; i < depth / kBlock; ++i) {
    prefetch(from + i + 4);
    const auto weights = reader(from[i]);
    for (int64_t k = 0; k < kBlock; ++k) {
      Vec low, high;
      weights.read(k, low, high);
      store(scratch + (i * kBlock + k) * kPanel, low);
      store(scratch + (i * kBlock + k) * kPanel + kLanes, high);
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
#if defined(__AVX512F__)
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

// One panel of outputs for all rows into c [rows][32].
void panel_product(const Linear& linear, int64_t panel, const float* x, int64_t rows, float* c, float* scratch) {
#if defined(__AVX512F__)
  if (linear.format == 2 && rows <= kMaxRows) {
    multiply_blocks<Block4>(linear, panel, x, rows, c);
  } else if (linear.format == 3 && rows <= kMaxRows) {
    multiply_blocks<Block8>(linear, panel, x, rows, c);
  } else
#endif
  {
    panel_sums(linear, panel, x, rows, c, scratch);
  }
  if (linear.bias != nullptr) {
    const Vec low = load(linear.bias + panel * kPanel), high = load(linear.bias + panel * kPanel + kLanes);
    for (int64_t r = 0; r < rows; ++r) {
      store(c + r * kPanel, load(c + r * kPanel) + low);
      store(c + r * kPanel + kLanes, load(c + r * kPanel + kLanes) + high);
    }
  }
}

inline int64_t panels(const Linear& linear) { return (linear.outputs + kPanel - 1) / kPanel; }

// ---- Norms and rotation ----

void normalise(const float* x, const float* weight, int64_t size, float epsilon, float* out) {
  Vec squares{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec v = load(x + i);
    squares = fma(v, v, squares);
  }
  const Vec scale = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + epsilon));
  for (int64_t i = 0; i < size; i += kLanes) store(out + i, load(weight + i) * (load(x + i) * scale));
}

void rotate(const float* x, const float* cosines, const float* sines, int64_t half, float* out) {
  for (int64_t i = 0; i < half; ++i) {
    const float low = x[i], high = x[half + i];
    out[i] = low * cosines[i] - high * sines[i];
    out[half + i] = high * cosines[i] + low * sines[i];
  }
}

// ---- Attention: a few consecutive rows of one sequence, kGroup query heads over the keys and values of a KV head ----

constexpr int kTile = 8;           // most rows
constexpr int64_t kStretch = 64;   // positions whose values stay in the first cache while all rows pass over them

struct Look {
  const float* query;  // [rows][query_stride], the group's heads one behind the other
  const float* keys;   // of position 0; [positions][kv_stride]
  const float* values;
  float* scores;  // [rows][kGroup][scores_stride]
  float* out;     // [rows][out_stride]
  int64_t query_stride, kv_stride, scores_stride, out_stride;
  int64_t rows;
  int64_t length;  // of the first row; each further row sees one position more
  float scaling;
};

inline int64_t blocks_of(int64_t length) { return (length + kLanes - 1) / kLanes; }

// Sixteen keys from `block` * 16 on against one query; positions that are not context are replaced, never added.
template <int kVecs>
inline Vec score(const float* query, const float* keys, int64_t stride, int64_t valid, Vec factor) {
  Vec products[16];
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) {
    const float* key = keys + j * stride;
    Vec product = load(query) * load(key);
#pragma GCC unroll 16
    for (int v = 1; v < kVecs; ++v) product = fma(load(query + v * kLanes), load(key + v * kLanes), product);
    products[j] = product;
  }
  const Vec found = sums(products) * factor;
  const IntVec place{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return place < static_cast<int32_t>(std::min<int64_t>(valid, kLanes)) ? found : splat(-INFINITY);
}

// Scores to weights e^(score - highest); returns what to divide by.
inline float weigh(float* scores, int64_t blocks) {
  Vec best = splat(-INFINITY);
  for (int64_t block = 0; block < blocks; ++block) best = max(best, load(scores + block * kLanes));
  const Vec top = splat(highest(best));
  Vec weights{};
  for (int64_t block = 0; block < blocks; ++block) {
    const Vec score = load(scores + block * kLanes);
    const Vec weight = score == splat(-INFINITY) ? Vec{} : exponential(score - top);
    weights += weight;
    store(scores + block * kLanes, weight);
  }
  return sum(weights);
}

// out += weights of positions `from` .. `to` times their values, in ascending order.
template <int kVecs, int kGroup>
inline void gather(const float* weights, int64_t weights_stride, const float* values, int64_t stride, int64_t from,
                   int64_t to, float* out) {
  Vec total[kGroup][kVecs];
  for (int g = 0; g < kGroup; ++g) {
    for (int v = 0; v < kVecs; ++v) total[g][v] = from == 0 ? Vec{} : load(out + (g * kVecs + v) * kLanes);
  }
  for (int64_t j = from; j < to; ++j) {
    const float* value = values + j * stride;
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      const Vec part = load(value + v * kLanes);
#pragma GCC unroll 4
      for (int g = 0; g < kGroup; ++g) total[g][v] = fma(splat(weights[g * weights_stride + j]), part, total[g][v]);
    }
  }
  for (int g = 0; g < kGroup; ++g) {
    for (int v = 0; v < kVecs; ++v) store(out + (g * kVecs + v) * kLanes, total[g][v]);
  }
}

// Rows share what is read, not arithmetic: each has the same operations in the same order as alone.
template <int kVecs, int kGroup>
void attend(const Look& look) {
  constexpr int kSize = kVecs * kLanes;
  const int64_t last = look.length + look.rows - 1;
  const int64_t row_scores = kGroup * look.scores_stride;
  for (int64_t block = 0; block < blocks_of(last); ++block) {
    const int64_t first = block * kLanes;
    for (int64_t r = 0; r < look.rows; ++r) {
      if (first >= look.length + r) continue;
      for (int g = 0; g < kGroup; ++g) {
        store(look.scores + r * row_scores + g * look.scores_stride + first,
              score<kVecs>(look.query + r * look.query_stride + g * kSize, look.keys + first * look.kv_stride,
                           look.kv_stride, look.length + r - first, splat(look.scaling)));
      }
    }
  }
  float divisors[kTile][kGroup];
  for (int64_t r = 0; r < look.rows; ++r) {
    for (int g = 0; g < kGroup; ++g) {
      divisors[r][g] = weigh(look.scores + r * row_scores + g * look.scores_stride, blocks_of(look.length + r));
    }
  }
  for (int64_t from = 0; from < last; from += kStretch) {
    for (int64_t r = 0; r < look.rows; ++r) {
      const int64_t to = std::min(from + kStretch, look.length + r);
      if (from >= to) continue;
      gather<kVecs, kGroup>(look.scores + r * row_scores, look.scores_stride, look.values, look.kv_stride, from, to,
                            look.out + r * look.out_stride);
    }
  }
  for (int64_t r = 0; r < look.rows; ++r) {
    for (int g = 0; g < kGroup; ++g) {
      float* out = look.out + r * look.out_stride + g * kSize;
      const Vec inverse = splat(1.0f / divisors[r][g]);
      for (int v = 0; v < kVecs; ++v) store(out + v * kLanes, load(out + v * kLanes) * inverse);
    }
  }
}

using Attend = void (*)(const Look&);

template <int kVecs>
Attend attend_for(int group) {
  switch (group) {
    case 1: return attend<kVecs, 1>;
    case 2: return attend<kVecs, 2>;
    case 3: return attend<kVecs, 3>;
    default: return attend<kVecs, 4>;
  }
}

Attend attend_for(int64_t head_size, int group) {
  switch (head_size) {
    case 16: return attend_for<1>(group);
    case 32: return attend_for<2>(group);
    case 48: return attend_for<3>(group);
    case 64: return attend_for<4>(group);
    case 80: return attend_for<5>(group);
    case 96: return attend_for<6>(group);
    case 112: return attend_for<7>(group);
    case 128: return attend_for<8>(group);
    case 256: return attend_for<16>(group);
    default: return nullptr;
  }
}

// ---- The forward ----

class Engine {
 public:
  Engine(const Model& model, int64_t capacity, int threads)
      : model_(model), layers_(model.layers, model.layers + model.num_layers), workers_(threads - 1) {
    model_.layers = layers_.data();
    scores_stride_ = (capacity + kLanes - 1) / kLanes * kLanes;
    group_ = static_cast<int>(model.heads / model.kv_heads);
    own_.resize(threads);
    for (auto& own : own_) {
      own.scores.resize(kTile * 4 * scores_stride_);
      own.scratch.resize(kDepth * kPanel);
    }
  }

  void forward(const Batch& batch) {
    reserve(batch.rows, batch.num_wanted);
    cut_tiles(batch);
    phases_.reset(8 * model_.num_layers + 4);
    workers_.run([&](int thread) { work(batch, own_[thread]); });
  }

 private:
  struct Own {  // what a thread needs for itself
    std::vector<float> normed, product, scores, scratch;
  };

  struct Tile {
    int64_t first, rows;
  };

  void reserve(int64_t rows, int64_t wanted) {
    const int64_t most = std::max(rows, wanted);
    if (most <= reserved_) return;
    qkv_.resize(most * (model_.heads + 2 * model_.kv_heads) * model_.head_size);
    attended_.resize(most * model_.heads * model_.head_size);
    active_.resize(most * model_.intermediate);
    for (auto& own : own_) {
      own.normed.resize(most * model_.hidden);
      own.product.resize(most * kPanel);
    }
    reserved_ = most;
  }

  void work(const Batch& batch, Own& own) {
    int64_t at = 0;
    const int64_t layers = std::min(batch.num_layers, model_.num_layers);
    for (int64_t i = 0; i < layers; ++i) {
      const Layer& layer = layers_[i];
      project(batch, layer, own, at);
      place(batch, layer, i, at);
      look(batch, i, own, at);
      add(batch, layer.attention_out, attended_.data(), own, at);
      activate(batch, layer, own, at);
      add(batch, layer.down, active_.data(), own, at);
    }
    speak(batch, own, at);
  }

  void norm_all(const Batch& batch, const float* weight, Own& own) {
    for (int64_t r = 0; r < batch.rows; ++r) {
      normalise(batch.hidden + r * model_.hidden, weight, model_.hidden, model_.epsilon,
                own.normed.data() + r * model_.hidden);
    }
  }

  void project(const Batch& batch, const Layer& layer, Own& own, int64_t& at) {
    const int64_t width = layer.qkv.outputs;
    phases_.run(
        at, panels(layer.qkv), [&] { norm_all(batch, layer.attention_norm, own); },
        [&](int64_t panel) {
          panel_product(layer.qkv, panel, own.normed.data(), batch.rows, own.product.data(), own.scratch.data());
          copy_out(own.product.data(), batch.rows, panel, width, qkv_.data());
        });
  }

  static void copy_out(const float* product, int64_t rows, int64_t panel, int64_t width, float* to) {
    const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, width - first);
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(to + r * width + first, product + r * kPanel, count * sizeof(float));
    }
  }

  // Norms and rotates queries and keys, and writes keys and values to where they stay.
  void place(const Batch& batch, const Layer& layer, int64_t index, int64_t& at) {
    const int64_t size = model_.head_size, half = size / 2, width = (model_.heads + 2 * model_.kv_heads) * size;
    const int64_t kv_width = model_.kv_heads * size;
    phases_.run(at, batch.rows, [&](int64_t r) {
      float head[256];
      float* row = qkv_.data() + r * width;
      const float* cosines = model_.cosines + batch.positions[r] * half;
      const float* sines = model_.sines + batch.positions[r] * half;
      const int64_t stored = (index * batch.storage_rows + batch.slot_rows[r] + batch.positions[r]) * kv_width;
      for (int64_t h = 0; h < model_.heads + model_.kv_heads; ++h) {
        const bool is_query = h < model_.heads;
        const float* norm = is_query ? layer.query_norm : layer.key_norm;
        if (norm != nullptr) {
          normalise(row + h * size, norm, size, model_.epsilon, head);
        } else {
          std::memcpy(head, row + h * size, size * sizeof(float));
        }
        float* to = is_query ? row + h * size : batch.keys + stored + (h - model_.heads) * size;
        rotate(head, cosines, sines, half, to);
      }
      std::memcpy(batch.values + stored, row + (model_.heads + model_.kv_heads) * size, kv_width * sizeof(float));
    });
  }

  // Consecutive rows of a sequence in one task, as many as leave enough tasks for all threads.
  void cut_tiles(const Batch& batch) {
    const int64_t enough = 4 * static_cast<int64_t>(own_.size());
    const int64_t most = std::clamp<int64_t>(batch.rows * model_.kv_heads / enough, 1, kTile);
    tiles_.clear();
    for (int64_t r = 0; r < batch.rows; ++r) {
      const bool goes_on = !tiles_.empty() && r - tiles_.back().first < most &&
                           batch.slot_rows[r] == batch.slot_rows[r - 1] &&
                           batch.positions[r] == batch.positions[r - 1] + 1;
      if (goes_on) {
        ++tiles_.back().rows;
      } else {
        tiles_.push_back({r, 1});
      }
    }
  }

  void look(const Batch& batch, int64_t index, Own& own, int64_t& at) {
    const int64_t size = model_.head_size, kv_heads = model_.kv_heads, kv_width = kv_heads * size;
    const int64_t width = (model_.heads + 2 * kv_heads) * size;
    phases_.run(at, static_cast<int64_t>(tiles_.size()) * kv_heads, [&](int64_t task) {
      const Tile& tile = tiles_[task / kv_heads];
      const int64_t kv_head = task % kv_heads;
      const int64_t base = (index * batch.storage_rows + batch.slot_rows[tile.first]) * kv_width + kv_head * size;
      for (int first = 0; first < group_; first += 4) {
        const int64_t head = kv_head * group_ + first;
        Look look;
        look.query = qkv_.data() + tile.first * width + head * size;
        look.keys = batch.keys + base;
        look.values = batch.values + base;
        look.scores = own.scores.data();
        look.out = attended_.data() + (tile.first * model_.heads + head) * size;
        look.query_stride = width;
        look.kv_stride = kv_width;
        look.scores_stride = scores_stride_;
        look.out_stride = model_.heads * size;
        look.rows = tile.rows;
        look.length = batch.positions[tile.first] + 1;
        look.scaling = model_.scaling;
        attend_for(size, std::min(4, group_ - first))(look);
      }
    });
  }

  // hidden += linear(x)
  void add(const Batch& batch, const Linear& linear, const float* x, Own& own, int64_t& at) {
    phases_.run(at, panels(linear), [&](int64_t panel) {
      panel_product(linear, panel, x, batch.rows, own.product.data(), own.scratch.data());
      const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, linear.outputs - first);
      for (int64_t r = 0; r < batch.rows; ++r) {
        float* to = batch.hidden + r * linear.outputs + first;
        for (int64_t i = 0; i < count; ++i) to[i] += own.product[r * kPanel + i];
      }
    });
  }

  void activate(const Batch& batch, const Layer& layer, Own& own, int64_t& at) {
    phases_.run(
        at, panels(layer.gate_up), [&] { norm_all(batch, layer.mlp_norm, own); },
        [&](int64_t panel) {
          panel_product(layer.gate_up, panel, own.normed.data(), batch.rows, own.product.data(), own.scratch.data());
          for (int64_t r = 0; r < batch.rows; ++r) {
            const float* both = own.product.data() + r * kPanel;
            store(active_.data() + r * model_.intermediate + panel * kLanes, silu(load(both)) * load(both + kLanes));
          }
        });
  }

  void speak(const Batch& batch, Own& own, int64_t& at) {
    const auto norm_wanted = [&] {
      for (int64_t r = 0; r < batch.num_wanted; ++r) {
        normalise(batch.hidden + batch.wanted[r] * model_.hidden, model_.final_norm, model_.hidden, model_.epsilon,
                  own.normed.data() + r * model_.hidden);
      }
    };
    if (batch.num_wanted == 0) return;
    phases_.run(at, panels(model_.head), norm_wanted, [&](int64_t panel) {
      panel_product(model_.head, panel, own.normed.data(), batch.num_wanted, own.product.data(), own.scratch.data());
      copy_out(own.product.data(), batch.num_wanted, panel, model_.head.outputs, batch.logits);
    });
  }

  Model model_;
  std::vector<Layer> layers_;
  Workers workers_;
  Phases phases_;
  int group_;
  int64_t scores_stride_;
  int64_t reserved_ = 0;
  std::vector<float> qkv_, attended_, active_;
  std::vector<Own> own_;
  std::vector<Tile> tiles_;
};

}  // namespace

extern "C" {

// 1 if a head of this size can be attended.
int paceline_can_attend(int64_t head_size) { return attend_for(head_size, 1) != nullptr; }

// Bytes of a panel's 32 inputs in blocks of format 2 or 3; 0 where this machine has no such format.
int64_t paceline_block_bytes(int64_t format) {
#if defined(__AVX512F__)
  return format == 2 ? sizeof(Block4) : format == 3 ? sizeof(Block8) : 0;
#else
  return 0;
#endif
}

// Stores float32 [outputs, inputs] as blocks of `format`; 0 if not every number comes back bit for bit.
int paceline_pack(int64_t format, const float* weight, int64_t inputs, int64_t outputs, void* to) {
#if defined(__AVX512F__)
  if (format == 2) return pack_blocks(weight, inputs, outputs, static_cast<Block4*>(to));
  if (format == 3) return pack_blocks(weight, inputs, outputs, static_cast<Block8*>(to));
#endif
  return 0;
}

// The tensors that `model` points to must outlive the engine; the structs are copied.
void* paceline_make(const Model* model, int64_t capacity, int threads) { return new Engine(*model, capacity, threads); }

void paceline_forward(void* engine, const Batch* batch) { static_cast<Engine*>(engine)->forward(*batch); }

void paceline_free(void* engine) { delete static_cast<Engine*>(engine); }

}  // extern "C"
