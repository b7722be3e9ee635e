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
// Linear layers: exact float32 in linear.h, 8-bit integers in integer.h. Attention: attention.h. Who takes which task: threads.h.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "ahead.h"
#include "attention.h"
#include "highest.h"
#include "integer.h"
#include "interface.h"
#include "linear.h"
#include "threads.h"
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

constexpr int64_t kMostHead = 256;
constexpr int64_t kFewRows = 16;  // that every thread prepares for itself
constexpr int64_t kPiece = 8;     // blocks of keys: a task of scores where scores are apart

// ---- The forward ----

constexpr int64_t kAtOnce = 200;            // lines: what multiplying itself asks for too late when it begins
constexpr int64_t kMostAhead = 512 * 1024;  // bytes: a part of the second cache
constexpr int64_t kMostInputs = 256 * 1024;  // bytes of a linear layer's inputs that a thread passes over panel by panel

int64_t block_bytes(int64_t format) {
  switch (format) {
#if defined(PACELINE_BLOCKS)
    case 2: return sizeof(Block4);
    case 3: return sizeof(Block8);
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
      own.queries.resize(kTile * 4 * kMostHead);
    }
  }

  void forward(const Batch& batch) {
    reserve(batch.rows, batch.num_wanted);
    cut(batch);
    phases_.reset(11 * model_.num_layers + 4);
    for (Own& own : own_) own.speaks = false;  // who wakes too late does not
    workers_.run([&](int thread) { work(batch, own_[thread]); });
    for (int64_t r = 0; r < batch.num_wanted; ++r) {
      Highest highest;
      highest.start();
      for (const Own& own : own_) {
        if (own.speaks) highest.merge(own.highest[r]);
      }
      highest.write(batch.best + r, batch.top + r);
    }
  }

 private:
  struct Inputs {  // of a linear layer, all rows, as it takes them
    const float* floats;
    const Quantised* integers;
  };

  struct Own {  // what a thread needs for itself
    int thread;
    Floats normed, product, queries, scores, scratch, widened;
    std::vector<Quantised> quantised;
    std::vector<Highest, Aligned<Highest>> highest;  // of each row whose logits are wanted,
    bool speaks = false;                             // where this thread has made some
    Inputs inputs;
    Ahead ahead;
  };

  struct Tile {
    int64_t first, rows;
  };

  struct Piece {  // blocks of keys for the rows of a tile
    Tile tile;
    int64_t first, end;
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
        own.highest.resize(few);
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
      attend(batch, layer, i, own, at);
      add(batch, layer.attention_out, attended_.data(), layer.gate_up, own, at);
      activate(batch, layer, own, at);
      add(batch, layer.down, active_.data(), i + 1 < layers ? layers_[i + 1].qkv : model_.head, own, at);
    }
    speak(batch, own, at);
  }

  // Row r of a linear layer's inputs x [rows] as the layer takes it: normed first, where there is a norm.
  void take_in(const Linear& linear, const float* norm, const float* x, int64_t r, int64_t rows, float* normed, Quantised* to) const {
    const float* row = x + r * linear.inputs;
    if (norm != nullptr) {
      normalise(row, norm, linear.inputs, model_.epsilon, normed + r * linear.inputs);
      row = normed + r * linear.inputs;
    }
    if (takes_integers(linear)) quantise(linear, row, rows, to + r * (linear.inputs / kBlock));
  }

  // A linear layer over all rows, task(panel, rows) for each panel of it and those rows whose inputs stay in the second cache meanwhile.
  // Many rows are taken in together, a few by each thread for itself: that costs less than waiting for each other.
  template <typename Task, typename Finish>
  void apply(const Batch& batch, const Linear& linear, const float* norm, const float* x, Own& own, int64_t& at,
             Task&& task, Finish&& finish) {
    const bool many = batch.rows > kFewRows;
    float* normed = many ? normed_.data() : own.normed.data();
    Quantised* integers = many ? quantised_.data() : own.quantised.data();
    own.inputs = {norm != nullptr ? normed : x, integers};
    if (many) phases_.run(at, own.thread, batch.rows, [&](int64_t r) { take_in(linear, norm, x, r, batch.rows, normed, integers); });
    const int64_t count = panels(linear), parts = (batch.rows + rows_at_once(linear) - 1) / rows_at_once(linear);
    phases_.run(
        at, own.thread, count * parts,
        [&] {
          for (int64_t r = 0; r < batch.rows && !many; ++r) take_in(linear, norm, x, r, batch.rows, normed, integers);
        },
        [&](int64_t index) {
          const int64_t part = index / count, first = batch.rows * part / parts;
          task(index % count, Tile{first, batch.rows * (part + 1) / parts - first});
        },
        finish);
  }

  static int64_t rows_at_once(const Linear& linear) {
    const int64_t bytes = takes_integers(linear) ? linear.inputs / kBlock * sizeof(Quantised) : linear.inputs * sizeof(float);
    return std::max<int64_t>(kMostInputs / bytes, kFewRows);
  }

  static void product(const Linear& linear, int64_t panel, const Tile& rows, Own& own) {
    if (takes_integers(linear)) {
      const Quantised* x = own.inputs.integers + rows.first * (linear.inputs / kBlock);
      integer_product(linear, panel, x, rows.rows, own.product.data());
    } else {
      const float* x = own.inputs.floats + rows.first * linear.inputs;
      panel_product(linear, panel, x, rows.rows, own.product.data(), own.scratch.data());
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
        [&](int64_t panel, const Tile& rows) {
          product(layer.qkv, panel, rows, own);
          copy_out(own.product.data(), rows.rows, panel, width, qkv_.data() + rows.first * width);
        },
        [&] { aim(layer.attention_out, own); });
  }

  static void copy_out(const float* product, int64_t rows, int64_t panel, int64_t width, float* to) {
    const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, width - first);
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(to + r * width + first, product + r * kPanel, count * sizeof(float));
    }
  }

  // Where the rows of each sequence are few, tasks place what they need themselves. Where tasks would then be few and long too, scores
  // and values are tasks of their own, the scores in pieces of the context: no thread is left with more than its part.
  void attend(const Batch& batch, const Layer& layer, int64_t index, Own& own, int64_t& at) {
    const int64_t kv_heads = model_.kv_heads, num_pieces = static_cast<int64_t>(pieces_.size());
    if (way_ == Way::kMany) place(batch, layer, index, own, at);
    phases_.run(at, own.thread, num_pieces * kv_heads, [&](int64_t task) {
      // A KV head's rows one behind the other: a thread finds in its cache what it has read for those before.
      const int64_t kv_head = task / num_pieces;
      const Piece& piece = pieces_[task % num_pieces];
      if (way_ != Way::kMany) place(batch, layer, index, piece, kv_head);
      for (int first = 0; first < group_; first += 4) {
        const int group = std::min(4, group_ - first);
        const int64_t head = kv_head * group_ + first;
        float* scores = way_ == Way::kApart ? scores_of(piece.tile.first, head) : own.scores.data();
        Look look = look_of(batch, index, piece.tile, head, own, scores, way_ == Way::kApart ? model_.heads : group);
        if (way_ != Way::kMany) turn_queries(batch, layer, piece.tile, head, group, own, look);
        const Attention attention = attention_of(group);
        attention.score(look, piece.first, piece.end);
        if (way_ != Way::kApart) attention.gather(look);
      }
    });
    if (way_ != Way::kApart) return;
    // One head a task where there are few rows: what several tasks of a thread read lies in its cache.
    const bool few = batch.rows * kv_heads < 3 * static_cast<int64_t>(own_.size());
    const int step = few ? 1 : std::min(4, group_);
    const int64_t parts = (group_ + step - 1) / step;
    phases_.run(at, own.thread, batch.rows * kv_heads * parts, [&](int64_t task) {
      const int64_t kv_head = task / (batch.rows * parts), row = task % batch.rows, first = task / batch.rows % parts * step;
      const int64_t head = kv_head * group_ + first;
      attention_of(static_cast<int>(std::min<int64_t>(step, group_ - first)))
          .gather(look_of(batch, index, {row, 1}, head, own, scores_of(row, head), model_.heads));
    });
  }

  // Norms and rotates queries and keys, and writes keys and values to where they stay. A task is a KV head of a few rows: the keys of
  // consecutive positions share lines of the cache, which two threads would take from each other.
  void place(const Batch& batch, const Layer& layer, int64_t index, const Own& own, int64_t& at) {
    const int64_t parts = (batch.rows + kLanes - 1) / kLanes;
    phases_.run(at, own.thread, parts * model_.kv_heads, [&](int64_t task) {
      const int64_t first = task % parts * kLanes, kv_head = task / parts;
      for (int64_t r = first; r < std::min<int64_t>(first + kLanes, batch.rows); ++r) {
        float* queries = qkv_row(r) + kv_head * group_ * model_.head_size;
        for (int h = 0; h < group_; ++h, queries += model_.head_size) turn(batch, r, layer.query_norm, queries, queries);
        place(batch, layer, index, r, kv_head);
      }
    });
  }

  // Keys and values of those of the rows that lie in the piece.
  void place(const Batch& batch, const Layer& layer, int64_t index, const Piece& piece, int64_t kv_head) {
    for (int64_t r = piece.tile.first; r < piece.tile.first + piece.tile.rows; ++r) {
      const int64_t block = batch.positions[r] / kLanes;
      if (piece.first <= block && block < piece.end) place(batch, layer, index, r, kv_head);
    }
  }

  void place(const Batch& batch, const Layer& layer, int64_t index, int64_t r, int64_t kv_head) {
    const int64_t size = model_.head_size, kv_width = model_.kv_heads * size, position = batch.positions[r];
    const float* key = qkv_row(r) + (model_.heads + kv_head) * size;
    float rotated[kMostHead];
    turn(batch, r, layer.key_norm, key, rotated);
    const int64_t first = (index * batch.storage_rows + batch.slot_rows[r]) * kv_width;
    const int64_t block = first + position / kLanes * kLanes * kv_width + kv_head * size * kLanes;
    scatter(rotated, size, batch.keys, block + position % kLanes);
    keep(key + kv_width, size, batch.values, first + position * kv_width + kv_head * size);
  }

  float* qkv_row(int64_t r) { return qkv_.data() + r * (model_.heads + 2 * model_.kv_heads) * model_.head_size; }

  // A head of a row, normed where there is a norm, and rotated.
  void turn(const Batch& batch, int64_t r, const float* norm, const float* from, float* to) const {
    const int64_t size = model_.head_size, half = size / 2;
    float head[kMostHead];
    if (norm != nullptr) {
      normalise(from, norm, size, model_.epsilon, head);
    } else {
      std::memcpy(head, from, size * sizeof(float));
    }
    rotate(head, model_.cosines + batch.positions[r] * half, model_.sines + batch.positions[r] * half, half, to);
  }

  // The queries of `look` as they are multiplied, in this thread's own room: other tasks need what they are made of.
  void turn_queries(const Batch& batch, const Layer& layer, const Tile& tile, int64_t head, int64_t group, Own& own, Look& look) {
    const int64_t size = model_.head_size;
    for (int64_t r = 0; r < tile.rows; ++r) {
      for (int64_t g = 0; g < group; ++g) {
        turn(batch, tile.first + r, layer.query_norm, qkv_row(tile.first + r) + (head + g) * size,
             own.queries.data() + (r * group + g) * size);
      }
    }
    look.query = own.queries.data();
    look.query_stride = group * size;
  }

  // Puts a key where those of its block lie, kLanes apart from number `at` on.
  void scatter(const float* from, int64_t count, void* to, int64_t at) const {
    if (model_.half_kv) {
      Half narrowed[kMostHead];
      narrow(from, count, narrowed);
      for (int64_t i = 0; i < count; ++i) static_cast<Half*>(to)[at + i * kLanes] = narrowed[i];
    } else {
      for (int64_t i = 0; i < count; ++i) static_cast<float*>(to)[at + i * kLanes] = from[i];
    }
  }

  // Puts numbers where values from number `at` on lie.
  void keep(const float* from, int64_t count, void* to, int64_t at) const {
    if (model_.half_kv) {
      narrow(from, count, static_cast<Half*>(to) + at);
    } else {
      std::memcpy(static_cast<float*>(to) + at, from, count * sizeof(float));
    }
  }

  // How attention is cut into tasks.
  enum class Way {
    kMany,      // rows of a sequence in several tasks: keys and values are placed before any of them
    kTogether,  // all rows of a sequence in one
    kApart,     // as well, but scores in pieces of the context, and values afterwards
  };

  void cut(const Batch& batch) {
    const int64_t threads = static_cast<int64_t>(own_.size());
    pieces_.clear();
    bool whole = cut_tiles(batch, kTile);
    const int64_t tasks = static_cast<int64_t>(tiles_.size()) * model_.kv_heads;
    const bool apart = threads > 1 && tasks < 3 * threads && batch.rows <= kFewRows;  // so that their scores take little memory
    way_ = !whole ? Way::kMany : apart ? Way::kApart : Way::kTogether;
    // As many rows in a task as leave enough tasks for all threads.
    const int64_t most = batch.rows * model_.kv_heads / (2 * threads);
    if (way_ == Way::kMany && most < kTile) cut_tiles(batch, std::max<int64_t>(most, 1));
    for (const Tile& tile : tiles_) {
      const int64_t blocks = blocks_of(batch.positions[tile.first] + tile.rows);
      const int64_t piece = way_ == Way::kApart ? kPiece : blocks;
      for (int64_t first = 0; first < blocks; first += piece) pieces_.push_back({tile, first, std::min(first + piece, blocks)});
    }
    if (way_ == Way::kApart && scores_.size() < static_cast<size_t>(batch.rows * model_.heads * scores_stride_)) {
      scores_.resize(batch.rows * model_.heads * scores_stride_);
    }
  }

  // Consecutive rows of a sequence, at most so many; whether each sequence is in one tile.
  bool cut_tiles(const Batch& batch, int64_t most) {
    bool whole = true;
    tiles_.clear();
    for (int64_t r = 0; r < batch.rows; ++r) {
      const bool same = r > 0 && batch.slot_rows[r] == batch.slot_rows[r - 1];
      if (same && r - tiles_.back().first < most && batch.positions[r] == batch.positions[r - 1] + 1) {
        ++tiles_.back().rows;
      } else {
        whole = whole && !same;
        tiles_.push_back({r, 1});
      }
    }
    return whole;
  }

  float* scores_of(int64_t row, int64_t head) { return scores_.data() + (row * model_.heads + head) * scores_stride_; }

  Attention attention_of(int group) const {
    return model_.half_kv ? attention_for<Half>(model_.head_size, group) : attention_for<float>(model_.head_size, group);
  }

  // `head` and those behind it, `heads` of which lie between the scores of two rows.
  Look look_of(const Batch& batch, int64_t index, const Tile& tile, int64_t head, Own& own, float* scores, int64_t heads) {
    const int64_t size = model_.head_size, kv_width = model_.kv_heads * size, kv_head = head / group_;
    const int64_t base = (index * batch.storage_rows + batch.slot_rows[tile.first]) * kv_width;
    const int64_t kept_bytes = model_.half_kv ? sizeof(Half) : sizeof(float);
    Look look;
    look.query = qkv_row(tile.first) + head * size;
    look.keys = static_cast<const char*>(batch.keys) + (base + kv_head * size * kLanes) * kept_bytes;
    look.values = static_cast<const char*>(batch.values) + (base + kv_head * size) * kept_bytes;
    look.widened = own.widened.data();
    look.scores = scores;
    look.out = attended_.data() + (tile.first * model_.heads + head) * size;
    look.query_stride = (model_.heads + 2 * model_.kv_heads) * size;
    look.kv_stride = kv_width;
    look.row_scores = heads * scores_stride_;
    look.scores_stride = scores_stride_;
    look.out_stride = model_.heads * size;
    look.rows = tile.rows;
    look.length = batch.positions[tile.first] + 1;
    look.scaling = model_.scaling;
    look.ahead = &own.ahead;
    return look;
  }

  // hidden += linear(x)
  void add(const Batch& batch, const Linear& linear, const float* x, const Linear& next, Own& own, int64_t& at) {
    apply(batch, linear, nullptr, x, own, at, [&](int64_t panel, const Tile& rows) {
      product(linear, panel, rows, own);
      const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, linear.outputs - first);
      for (int64_t r = 0; r < rows.rows; ++r) {
        float* to = batch.hidden + (rows.first + r) * linear.outputs + first;
        for (int64_t i = 0; i < count; ++i) to[i] += own.product[r * kPanel + i];
      }
    }, [&] { aim(next, own); });
  }

  void activate(const Batch& batch, const Layer& layer, Own& own, int64_t& at) {
    apply(
        batch, layer.gate_up, layer.mlp_norm, batch.hidden, own, at,
        [&](int64_t panel, const Tile& rows) {
          product(layer.gate_up, panel, rows, own);
          for (int64_t r = 0; r < rows.rows; ++r) {
            const float* both = own.product.data() + r * kPanel;
            float* to = active_.data() + (rows.first + r) * model_.intermediate + panel * kLanes;
            store(to, silu(load(both)) * load(both + kLanes));
          }
        },
        [&] { aim(layer.down, own); });
  }

  void speak(const Batch& batch, Own& own, int64_t& at) {
    const auto norm_wanted = [&] {
      own.speaks = true;
      for (int64_t r = 0; r < batch.num_wanted; ++r) own.highest[r].start();
      float* normed = own.normed.data();
      for (int64_t r = 0; r < batch.num_wanted; ++r) {
        normalise(batch.hidden + batch.wanted[r] * model_.hidden, model_.final_norm, model_.hidden, model_.epsilon,
                  normed + r * model_.hidden);
        take_in(model_.head, nullptr, normed, r, batch.num_wanted, nullptr, own.quantised.data());
      }
      own.inputs = {normed, own.quantised.data()};
    };
    if (batch.num_wanted == 0) return;
    phases_.run(at, own.thread, panels(model_.head), norm_wanted, [&](int64_t panel) {
      product(model_.head, panel, {0, batch.num_wanted}, own);
      copy_out(own.product.data(), batch.num_wanted, panel, model_.head.outputs, batch.logits);
      for (int64_t r = 0; r < batch.num_wanted; ++r) {
        for (int64_t at = 0; at < kPanel; at += kLanes) {
          const int64_t first = panel * kPanel + at;
          own.highest[r].add(load(own.product.data() + r * kPanel + at), first, model_.head.outputs - first);
        }
      }
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
  std::vector<Piece> pieces_;
  Way way_ = Way::kMany;
  Floats scores_;  // [rows][heads][scores_stride], where they are made by tasks of their own
};

}  // namespace

extern "C" {

// 1 if a head of this size can be attended.
int paceline_can_attend(int64_t head_size) { return attention_for<float>(head_size, 1).score != nullptr; }

// Bytes of a panel's 32 inputs in blocks of `format`; 0 where this machine has no such format.
int64_t paceline_block_bytes(int64_t format) { return block_bytes(format); }

// Stores float32 [outputs, inputs] as blocks of `format`; 0 if not every number comes back bit for bit.
int paceline_pack(int64_t format, const float* weight, int64_t inputs, int64_t outputs, void* to) {
  switch (format) {
#if defined(PACELINE_BLOCKS)
    case 2: return pack_blocks(weight, inputs, outputs, static_cast<Block4*>(to));
    case 3: return pack_blocks(weight, inputs, outputs, static_cast<Block8*>(to));
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
      quantise(*linear, x + r * linear->inputs, rows, quantised.data() + r * (linear->inputs / kBlock));
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
