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
// Linear layers: exact float32 in linear.h, 8-bit integers in integer.h.

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
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#include "integer.h"
#include "interface.h"
#include "linear.h"
#include "vectors.h"

namespace {

// ---- Memory ----

// Begins where a line of the caches does: a vector across two of them is read twice.
template <typename T>
struct Aligned {
  using value_type = T;
  Aligned() = default;
  template <typename U>
  Aligned(const Aligned<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t{64}); }
  bool operator==(const Aligned&) const { return true; }
  bool operator!=(const Aligned&) const { return false; }
};

using Floats = std::vector<float, Aligned<float>>;

// ---- Threads ----

struct alignas(64) Counter {
  std::atomic<int64_t> value{0};
};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Phases {
 public:
  explicit Phases(int threads) : threads_(threads) {}

  void reset(size_t count) {
    count *= threads_ + 1;
    if (count > size_) {
      counters_.reset(new Counter[count]);
      size_ = count;
    }
    for (size_t i = 0; i < count; ++i) counters_[i].value.store(0, std::memory_order_relaxed);
  }

  // Runs task(i) for i < count, shared among the threads; before the first one this thread takes, prepare(), and when there
  // is nothing left to take, finish(). Each thread has a range of its own, since neighbouring tasks read neighbouring
  // memory, and then helps in the others'. It takes a few at a time, since taking waits for all that is under way.
  template <typename Prepare, typename Task, typename Finish>
  void run(int64_t& at, int thread, int64_t count, Prepare&& prepare, Task&& task, Finish&& finish) {
    Counter* next = &counters_[at++ * (threads_ + 1)];
    std::atomic<int64_t>& done = next[threads_].value;
    const int64_t few = std::max<int64_t>(1, count / threads_ / 12);
    int64_t taken = 0;
    for (int turn = 0; turn < threads_; ++turn) {
      const int owner = (thread + turn) % threads_;
      const int64_t begin = begin_of(owner, count), end = begin_of(owner + 1, count);
      for (;;) {
        const int64_t first = begin + next[owner].value.fetch_add(few, std::memory_order_relaxed);
        if (first >= end) break;
        if (taken == 0) prepare();
        const int64_t last = std::min(first + few, end);
        for (int64_t i = first; i < last; ++i) task(i);
        taken += last - first;
      }
    }
    if (taken != 0) done.fetch_add(taken, std::memory_order_release);
    finish();
    for (int spins = 0; done.load(std::memory_order_acquire) < count; ++spins) {
      if (spins < 4000) {
        relax();
      } else {
        sched_yield();  // the core of whoever holds the task is wanted elsewhere: do not make it worse
      }
    }
  }

  template <typename Task>
  void run(int64_t& at, int thread, int64_t count, Task&& task) {
    run(at, thread, count, [] {}, task, [] {});
  }

  // First task of a thread's range.
  int64_t begin_of(int thread, int64_t count) const { return count * thread / threads_; }

 private:
  const int threads_;
  std::unique_ptr<Counter[]> counters_;
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

// ---- Weights asked for in advance ----

// What this thread will read next, brought into the second cache piece by piece while it computes something else.
class Ahead {
 public:
  void aim(const void* begin, int64_t bytes) {
    at_ = static_cast<const char*>(begin);
    end_ = at_ + bytes;
  }

  void ask(int64_t lines) {
    for (; lines > 0 && at_ < end_; --lines, at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

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
constexpr int kAsked = 11;         // lines of weights asked for beside sixteen keys of a row and head
constexpr int64_t kStretch = 64;   // positions whose values stay in the first cache while all rows pass over them

struct Look {
  const float* query;  // [rows][query_stride], the group's heads one behind the other
  const void* keys;    // of position 0; [positions][kv_stride], float32 or float16
  const void* values;
  float* widened;  // [kStretch][head size]: room for what was float16
  float* scores;   // [rows][kGroup][scores_stride]
  float* out;     // [rows][out_stride]
  int64_t query_stride, kv_stride, scores_stride, out_stride;
  int64_t rows;
  int64_t length;  // of the first row; each further row sees one position more
  float scaling;
  Ahead* ahead;
};

inline int64_t blocks_of(int64_t length) { return (length + kLanes - 1) / kLanes; }

// Sixteen keys from `block` * 16 on against one query; positions that are not context are replaced, never added, and not
// even read: memory that was read before it is written is mapped twice, the second time at the cost of all cores.
template <int kVecs>
inline Vec score(const float* query, const float* keys, int64_t stride, int64_t valid, Vec factor) {
  Vec products[16];
  const int64_t last = std::min<int64_t>(valid, kLanes) - 1;
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) {
    const float* key = keys + std::min<int64_t>(j, last) * stride;
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

// `count` keys or values as float32, and how far apart they lie: where they are, or widened into `room`.
template <int kVecs>
inline const float* as_floats(const float* from, int64_t, int64_t, float*) {
  return from;
}

template <int kVecs>
inline const float* as_floats(const Half* from, int64_t stride, int64_t count, float* room) {
  for (int64_t j = 0; j < count; ++j) {
    for (int v = 0; v < kVecs; ++v) store(room + (j * kVecs + v) * kLanes, widen(from + j * stride + v * kLanes));
  }
  return room;
}

// out += weights of positions `from` .. `to` times their values, of which the first is that of `from`, in ascending order.
template <int kVecs, int kGroup>
inline void gather(const float* weights, int64_t weights_stride, const float* values, int64_t stride, int64_t from,
                   int64_t to, float* out) {
  Vec total[kGroup][kVecs];
  for (int g = 0; g < kGroup; ++g) {
    for (int v = 0; v < kVecs; ++v) total[g][v] = from == 0 ? Vec{} : load(out + (g * kVecs + v) * kLanes);
  }
  for (int64_t j = from; j < to; ++j) {
    const float* value = values + (j - from) * stride;
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

// Asks for the keys or values of positions `first` .. `last`.
template <int kVecs, typename Kept>
inline void ask(const Kept* from, int64_t stride, int64_t first, int64_t last) {
  constexpr int kLine = 64 / sizeof(Kept);
  for (int64_t j = first; j < last; ++j) {
    for (int at = 0; at < kVecs * kLanes; at += kLine) __builtin_prefetch(from + j * stride + at);
  }
}

// Rows share what is read, not arithmetic: each has the same operations in the same order as alone.
template <typename Kept, int kVecs, int kGroup>
void attend(const Look& look) {
  constexpr int kSize = kVecs * kLanes;
  const Kept *all_keys = static_cast<const Kept*>(look.keys), *all_values = static_cast<const Kept*>(look.values);
  const int64_t stride = std::is_same<Kept, float>::value ? look.kv_stride : kSize;
  const int64_t last = look.length + look.rows - 1;
  const int64_t row_scores = kGroup * look.scores_stride;
  for (int64_t block = 0; block < blocks_of(last); ++block) {
    const int64_t first = block * kLanes;
    const float* keys = as_floats<kVecs>(all_keys + first * look.kv_stride, look.kv_stride,
                                         std::min<int64_t>(kLanes, last - first), look.widened);
    for (int64_t r = 0; r < look.rows; ++r) {
      if (first >= look.length + r) continue;
      for (int g = 0; g < kGroup; ++g) {
        // A little before each piece of arithmetic: asking for much at once waits for it.
        const int64_t from = kLanes * (r * kGroup + g) / (look.rows * kGroup);
        const int64_t to = kLanes * (r * kGroup + g + 1) / (look.rows * kGroup);
        ask<kVecs>(all_keys, look.kv_stride, first + 2 * kLanes + from, std::min(first + 2 * kLanes + to, last));
        ask<kVecs>(all_values, look.kv_stride, first + from, std::min(first + to, last));
        look.ahead->ask(kAsked);
        store(look.scores + r * row_scores + g * look.scores_stride + first,
              score<kVecs>(look.query + r * look.query_stride + g * kSize, keys, stride, look.length + r - first,
                           splat(look.scaling)));
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
    const float* values = as_floats<kVecs>(all_values + from * look.kv_stride, look.kv_stride,
                                           std::min(kStretch, last - from), look.widened);
    for (int64_t r = 0; r < look.rows; ++r) {
      const int64_t to = std::min(from + kStretch, look.length + r);
      if (from >= to) continue;
      gather<kVecs, kGroup>(look.scores + r * row_scores, look.scores_stride, values, stride, from, to,
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

template <typename Kept, int kVecs>
Attend attend_for(int group) {
  switch (group) {
    case 1: return attend<Kept, kVecs, 1>;
    case 2: return attend<Kept, kVecs, 2>;
    case 3: return attend<Kept, kVecs, 3>;
    default: return attend<Kept, kVecs, 4>;
  }
}

template <typename Kept>
Attend attend_for(int64_t head_size, int group) {
  switch (head_size) {
    case 16: return attend_for<Kept, 1>(group);
    case 32: return attend_for<Kept, 2>(group);
    case 48: return attend_for<Kept, 3>(group);
    case 64: return attend_for<Kept, 4>(group);
    case 80: return attend_for<Kept, 5>(group);
    case 96: return attend_for<Kept, 6>(group);
    case 112: return attend_for<Kept, 7>(group);
    case 128: return attend_for<Kept, 8>(group);
    case 256: return attend_for<Kept, 16>(group);
    default: return nullptr;
  }
}

constexpr int64_t kMostHead = 256;
constexpr int64_t kFewRows = 16;  // that every thread prepares for itself

// ---- The forward ----

constexpr int64_t kAtOnce = 200;            // lines: what multiplying itself asks for too late when it begins
constexpr int64_t kMostAhead = 512 * 1024;  // bytes: a part of the second cache

int64_t block_bytes(int64_t format) {
  switch (format) {
#if defined(__AVX512F__)
    case 2: return sizeof(Block4);
    case 3: return sizeof(Block8);
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    case kIntegers4: case kFine4: return sizeof(Grouped4);
    case kIntegers8: case kFine8: return sizeof(Grouped8);
#endif
    default: return 0;
  }
}

inline int64_t panel_bytes(const Linear& linear) {
  switch (linear.format) {
    case 0: return linear.inputs * kPanel * 4;
    case 1: return linear.inputs * kPanel * 2;
    default: return linear.inputs / kBlock * block_bytes(linear.format);
  }
}

class Engine {
 public:
  Engine(const Model& model, int64_t capacity, int threads)
      : model_(model), layers_(model.layers, model.layers + model.num_layers), workers_(threads - 1), phases_(threads) {
    model_.layers = layers_.data();
    scores_stride_ = (capacity + kLanes - 1) / kLanes * kLanes;
    group_ = static_cast<int>(model.heads / model.kv_heads);
    own_.resize(threads);
    for (auto& own : own_) {
      own.thread = static_cast<int>(&own - own_.data());
      own.scores.resize(kTile * 4 * scores_stride_);
      own.scratch.resize(kDepth * kPanel);
      own.widened.resize(kStretch * kMostHead);
    }
  }

  void forward(const Batch& batch) {
    reserve(batch.rows, batch.num_wanted);
    cut_tiles(batch);
    phases_.reset(10 * model_.num_layers + 4);
    workers_.run([&](int thread) { work(batch, own_[thread]); });
  }

 private:
  struct Inputs {  // of a linear layer, all rows, as it takes them
    const float* floats;
    const Quantised* integers;
  };

  struct Own {  // what a thread needs for itself
    int thread;
    Floats normed, product, scores, scratch, widened;
    std::vector<Quantised> quantised;
    Inputs inputs;
    Ahead ahead;
  };

  struct Tile {
    int64_t first, rows;
  };

  void reserve(int64_t rows, int64_t wanted) {
    const int64_t widest = std::max({model_.hidden, model_.intermediate, model_.heads * model_.head_size});
    const int64_t blocks = widest / kBlock + 1;
    // What each thread takes in by itself: a few rows, and those whose logits are wanted. These may be many in a step of fewer rows than
    // an earlier one had, so they are counted apart.
    const int64_t few = std::max(kFewRows, wanted);
    if (few > reserved_few_) {
      for (auto& own : own_) {
        own.normed.resize(few * model_.hidden);
        own.quantised.resize(few * blocks);
      }
      reserved_few_ = few;
    }
    const int64_t most = std::max(rows, wanted);
    if (most <= reserved_) return;
    qkv_.resize(most * (model_.heads + 2 * model_.kv_heads) * model_.head_size);
    attended_.resize(most * model_.heads * model_.head_size);
    active_.resize(most * model_.intermediate);
    normed_.resize(most * model_.hidden);
    quantised_.resize(most * blocks);
    for (auto& own : own_) own.product.resize(most * kPanel);
    reserved_ = most;
  }

  void work(const Batch& batch, Own& own) {
    int64_t at = 0;
    const int64_t layers = std::min(batch.num_layers, model_.num_layers);
    for (int64_t i = 0; i < layers; ++i) {
      const Layer& layer = layers_[i];
      project(batch, layer, own, at);
      place(batch, layer, i, own, at);
      look(batch, i, own, at);
      add(batch, layer.attention_out, attended_.data(), layer.gate_up, own, at);
      activate(batch, layer, own, at);
      add(batch, layer.down, active_.data(), i + 1 < layers ? layers_[i + 1].qkv : model_.head, own, at);
    }
    speak(batch, own, at);
  }

  // Row r of a linear layer's inputs x as the layer takes it: normed first, where there is a norm.
  void take_in(const Linear& linear, const float* norm, const float* x, int64_t r, float* normed, Quantised* to) const {
    const float* row = x + r * linear.inputs;
    if (norm != nullptr) {
      normalise(row, norm, linear.inputs, model_.epsilon, normed + r * linear.inputs);
      row = normed + r * linear.inputs;
    }
    if (takes_integers(linear)) quantise(linear, row, to + r * (linear.inputs / kBlock));
  }

  // A linear layer over all rows, task(panel) for each panel of it. Many rows are taken in together, a few by each thread for itself:
  // that costs less than waiting for each other.
  template <typename Task, typename Finish>
  void apply(const Batch& batch, const Linear& linear, const float* norm, const float* x, Own& own, int64_t& at,
             Task&& task, Finish&& finish) {
    const bool many = batch.rows > kFewRows;
    float* normed = many ? normed_.data() : own.normed.data();
    Quantised* integers = many ? quantised_.data() : own.quantised.data();
    own.inputs = {norm != nullptr ? normed : x, integers};
    if (many) phases_.run(at, own.thread, batch.rows, [&](int64_t r) { take_in(linear, norm, x, r, normed, integers); });
    phases_.run(
        at, own.thread, panels(linear),
        [&] {
          for (int64_t r = 0; r < batch.rows && !many; ++r) take_in(linear, norm, x, r, normed, integers);
        },
        task, finish);
  }

  static void product(const Linear& linear, int64_t panel, int64_t rows, Own& own) {
    if (takes_integers(linear)) {
      integer_product(linear, panel, own.inputs.integers, rows, own.product.data());
    } else {
      panel_product(linear, panel, own.inputs.floats, rows, own.product.data(), own.scratch.data());
    }
  }

  // Asks for the first of this thread's share of a layer's weights; attention asks for more of it.
  void aim(const Linear& linear, Own& own) const {
    const int64_t begin = phases_.begin_of(own.thread, panels(linear));
    const int64_t end = phases_.begin_of(own.thread + 1, panels(linear)), bytes = panel_bytes(linear);
    own.ahead.aim(static_cast<const char*>(linear.weight) + begin * bytes, std::min((end - begin) * bytes, kMostAhead));
    own.ahead.ask(kAtOnce);
  }

  void project(const Batch& batch, const Layer& layer, Own& own, int64_t& at) {
    const int64_t width = layer.qkv.outputs;
    apply(
        batch, layer.qkv, layer.attention_norm, batch.hidden, own, at,
        [&](int64_t panel) {
          product(layer.qkv, panel, batch.rows, own);
          copy_out(own.product.data(), batch.rows, panel, width, qkv_.data());
        },
        [&] { aim(layer.attention_out, own); });
  }

  static void copy_out(const float* product, int64_t rows, int64_t panel, int64_t width, float* to) {
    const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, width - first);
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(to + r * width + first, product + r * kPanel, count * sizeof(float));
    }
  }

  // Norms and rotates queries and keys, and writes keys and values to where they stay.
  void place(const Batch& batch, const Layer& layer, int64_t index, const Own& own, int64_t& at) {
    const int64_t size = model_.head_size, half = size / 2, width = (model_.heads + 2 * model_.kv_heads) * size;
    const int64_t kv_width = model_.kv_heads * size;
    phases_.run(at, own.thread, batch.rows, [&](int64_t r) {
      float head[kMostHead], rotated[kMostHead];
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
        rotate(head, cosines, sines, half, is_query ? row + h * size : rotated);
        if (!is_query) keep(rotated, size, batch.keys, stored + (h - model_.heads) * size);
      }
      keep(row + (model_.heads + model_.kv_heads) * size, kv_width, batch.values, stored);
    });
  }

  // Puts numbers where keys or values from number `at` on lie.
  void keep(const float* from, int64_t count, void* to, int64_t at) const {
    if (model_.half_kv) {
      narrow(from, count, static_cast<Half*>(to) + at);
    } else {
      std::memcpy(static_cast<float*>(to) + at, from, count * sizeof(float));
    }
  }

  // Consecutive rows of a sequence in one task, as many as leave enough tasks for all threads.
  void cut_tiles(const Batch& batch) {
    const int64_t enough = 2 * static_cast<int64_t>(own_.size());
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
    const int64_t kept_bytes = model_.half_kv ? sizeof(Half) : sizeof(float);
    phases_.run(at, own.thread, static_cast<int64_t>(tiles_.size()) * kv_heads, [&](int64_t task) {
      const Tile& tile = tiles_[task / kv_heads];
      const int64_t kv_head = task % kv_heads;
      const int64_t base = (index * batch.storage_rows + batch.slot_rows[tile.first]) * kv_width + kv_head * size;
      for (int first = 0; first < group_; first += 4) {
        const int64_t head = kv_head * group_ + first;
        Look look;
        look.query = qkv_.data() + tile.first * width + head * size;
        look.keys = static_cast<const char*>(batch.keys) + base * kept_bytes;
        look.values = static_cast<const char*>(batch.values) + base * kept_bytes;
        look.widened = own.widened.data();
        look.scores = own.scores.data();
        look.out = attended_.data() + (tile.first * model_.heads + head) * size;
        look.query_stride = width;
        look.kv_stride = kv_width;
        look.scores_stride = scores_stride_;
        look.out_stride = model_.heads * size;
        look.rows = tile.rows;
        look.length = batch.positions[tile.first] + 1;
        look.scaling = model_.scaling;
        look.ahead = &own.ahead;
        const int group = std::min(4, group_ - first);
        (model_.half_kv ? attend_for<Half>(size, group) : attend_for<float>(size, group))(look);
      }
    });
  }

  // hidden += linear(x)
  void add(const Batch& batch, const Linear& linear, const float* x, const Linear& next, Own& own, int64_t& at) {
    apply(batch, linear, nullptr, x, own, at, [&](int64_t panel) {
      product(linear, panel, batch.rows, own);
      const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, linear.outputs - first);
      for (int64_t r = 0; r < batch.rows; ++r) {
        float* to = batch.hidden + r * linear.outputs + first;
        for (int64_t i = 0; i < count; ++i) to[i] += own.product[r * kPanel + i];
      }
    }, [&] { aim(next, own); });
  }

  void activate(const Batch& batch, const Layer& layer, Own& own, int64_t& at) {
    apply(
        batch, layer.gate_up, layer.mlp_norm, batch.hidden, own, at,
        [&](int64_t panel) {
          product(layer.gate_up, panel, batch.rows, own);
          for (int64_t r = 0; r < batch.rows; ++r) {
            const float* both = own.product.data() + r * kPanel;
            store(active_.data() + r * model_.intermediate + panel * kLanes, silu(load(both)) * load(both + kLanes));
          }
        },
        [&] { aim(layer.down, own); });
  }

  void speak(const Batch& batch, Own& own, int64_t& at) {
    const auto norm_wanted = [&] {
      float* normed = own.normed.data();
      for (int64_t r = 0; r < batch.num_wanted; ++r) {
        normalise(batch.hidden + batch.wanted[r] * model_.hidden, model_.final_norm, model_.hidden, model_.epsilon,
                  normed + r * model_.hidden);
        take_in(model_.head, nullptr, normed, r, nullptr, own.quantised.data());
      }
      own.inputs = {normed, own.quantised.data()};
    };
    if (batch.num_wanted == 0) return;
    phases_.run(at, own.thread, panels(model_.head), norm_wanted, [&](int64_t panel) {
      product(model_.head, panel, batch.num_wanted, own);
      copy_out(own.product.data(), batch.num_wanted, panel, model_.head.outputs, batch.logits);
    }, [] {});
  }

  Model model_;
  std::vector<Layer> layers_;
  Workers workers_;
  Phases phases_;
  int group_;
  int64_t scores_stride_;
  int64_t reserved_ = 0, reserved_few_ = 0;
  Floats qkv_, attended_, active_, normed_;
  std::vector<Quantised> quantised_;
  std::vector<Own> own_;
  std::vector<Tile> tiles_;
};

}  // namespace

extern "C" {

// 1 if a head of this size can be attended.
int paceline_can_attend(int64_t head_size) { return attend_for<float>(head_size, 1) != nullptr; }

// Bytes of a panel's 32 inputs in blocks of `format`; 0 where this machine has no such format.
int64_t paceline_block_bytes(int64_t format) { return block_bytes(format); }

// Stores float32 [outputs, inputs] as blocks of `format`; 0 if not every number comes back bit for bit.
int paceline_pack(int64_t format, const float* weight, int64_t inputs, int64_t outputs, void* to) {
  switch (format) {
#if defined(__AVX512F__)
    case 2: return pack_blocks(weight, inputs, outputs, static_cast<Block4*>(to));
    case 3: return pack_blocks(weight, inputs, outputs, static_cast<Block8*>(to));
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    case kIntegers4: case kFine4: return pack_blocks(weight, inputs, outputs, static_cast<Grouped4*>(to));
    case kIntegers8: case kFine8: return pack_blocks(weight, inputs, outputs, static_cast<Grouped8*>(to));
#endif
    default: return 0;
  }
}

// One linear layer alone, x [rows, inputs] to c [rows, padded outputs]: what tests compare with the slow reference.
void paceline_multiply(const Linear* linear, const float* x, int64_t rows, float* c) {
  std::vector<float> product(rows * kPanel), scratch(kDepth * kPanel);
  std::vector<Quantised> quantised(rows * (linear->inputs / kBlock + 1));
  if (takes_integers(*linear)) {
    for (int64_t r = 0; r < rows; ++r) {
      quantise(*linear, x + r * linear->inputs, quantised.data() + r * (linear->inputs / kBlock));
    }
  }
  for (int64_t panel = 0; panel < panels(*linear); ++panel) {
    if (takes_integers(*linear)) {
      integer_product(*linear, panel, quantised.data(), rows, product.data());
    } else {
      panel_product(*linear, panel, x, rows, product.data(), scratch.data());
    }
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(c + (r * panels(*linear) + panel) * kPanel, product.data() + r * kPanel, kPanel * sizeof(float));
    }
  }
}

// The tensors that `model` points to must outlive the engine; the structs are copied.
void* paceline_make(const Model* model, int64_t capacity, int threads) { return new Engine(*model, capacity, threads); }

void paceline_forward(void* engine, const Batch* batch) { static_cast<Engine*>(engine)->forward(*batch); }

void paceline_free(void* engine) { delete static_cast<Engine*>(engine); }

}  // extern "C"
