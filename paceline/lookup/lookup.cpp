// Look-ups, compiled: what suffix.py and backoff.py do for one text at each step, in a few microseconds. Python has the same
// (``PlainSuffixText``, ``PlainBackoffText``), which says what everything means and is the truth that tests hold this to.
#include <cstring>
#include <vector>

#include "history.h"
#include "trust.h"

namespace {

// The history of one text of up to `room` tokens, like ``own_history`` in history.py.
History* own_history(uint32_t room, const int* levels, int num_levels) {
  const uint32_t places = (room + 1 + kBlock - 1) / kBlock * kBlock;
  int bits = 0;
  for (uint32_t rest = places - 1; rest > 0; rest >>= 1) ++bits;
  auto* history = static_cast<History*>(history_make(places, num_levels, levels, std::max(4, bits - 1)));
  if (history != nullptr) history_begin(history, room, 0);
  return history;
}

struct SuffixText {
  History* own = nullptr;
  uint32_t room = 0;
  int levels[kMaxLevels];
  int num_levels;
  std::vector<int32_t> tokens;
  Path paths[2];  // in the text itself, in the pool
  Luck luck[2];

  // False: no memory; then nothing has changed.
  bool read(const int32_t* fresh, uint32_t count) {
    const uint32_t length = static_cast<uint32_t>(tokens.size()) + count;
    if (length <= room) {
      tokens.insert(tokens.end(), fresh, fresh + count);
      history_append(own, fresh, count);
      return true;
    }
    History* grown = own_history(2 * length, levels, num_levels);
    if (grown == nullptr) return false;
    history_free(own);
    own = grown;
    room = 2 * length;
    tokens.insert(tokens.end(), fresh, fresh + count);
    history_append(own, tokens.data(), length);
    return true;
  }

  void find(int source, Trust& trust, History* where, uint32_t scope, int max_found, int max_steps, int k, double bar) {
    int32_t guesses[kMaxK], votes[kMaxK], agreed[kMaxK], match = 0;
    const int context = std::min<int>(kMaxMatch, static_cast<int>(tokens.size()));
    const int found = history_guess(where, tokens.data() + tokens.size() - context, context, scope, source == 0,
                                    max_found, max_steps, k, guesses, votes, agreed, &match);
    const double factor = luck[source].factor();
    for (int i = 0; i < found; ++i) {
      Cell* cell = trust.of(source, match + i, votes[i]);
      const double share = static_cast<double>(agreed[i]) / votes[i];
      if (!paths[source].add(guesses[i], cell, share, factor, bar)) break;
    }
  }
};

constexpr int kMostOrder = 8;
constexpr int kBuckets = 12;  // of chances
constexpr double kStrength = 8.0;

uint64_t hash_of(const uint64_t* context, int length) {
  constexpr uint64_t multiplier = 0x9E3779B97F4A7C15ull;
  uint64_t key = length * multiplier;
  for (int i = 0; i < length; ++i) {
    key = (key ^ (context[i] + 1)) * multiplier;
    key ^= key >> 29;
  }
  return key;
}

struct Backoff {
  const uint32_t* checks;
  const uint32_t* tokens;
  const uint8_t* chances;
  uint64_t mask;
  int order;
  Cell cells[kMostOrder + 1][kBuckets + 1] = {};  // by tokens of context, chance

  // The slot of the longest known context that ends with these `length` tokens, and its length; -1: none is known.
  int64_t next(const uint64_t* context, int length, int* known) const {
    for (int tail = std::min(order, length); tail > 0; --tail) {
      const uint64_t key = hash_of(context + length - tail, tail);
      const uint32_t check = static_cast<uint32_t>(key >> 32) | 1u;
      for (uint64_t slot = key & mask; checks[slot] != 0; slot = (slot + 1) & mask) {
        if (checks[slot] != check) continue;
        *known = tail;
        return static_cast<int64_t>(slot);
      }
    }
    return -1;
  }

  Cell* cell(int length, double chance) {
    Cell* found = &cells[length][static_cast<int>(chance * kBuckets)];
    if (found->expected == 0.0) {
      const double start = kStrength * (chance > 0.0 ? chance : 1.0);
      *found = {start, start};
    }
    return found;
  }
};

struct BackoffText {
  uint64_t context[kMostOrder + kMaxK];
  int length = 0;
  Path path;
  Luck luck;
};

}  // namespace

extern "C" {

void* trust_make() { return new Trust(); }
void trust_free(void* trust) { delete static_cast<Trust*>(trust); }

// nullptr: no memory.
void* suffix_text_make(uint32_t room, const int* levels, int num_levels) {
  auto* text = new SuffixText();
  text->room = room;
  text->num_levels = num_levels;
  std::copy_n(levels, num_levels, text->levels);
  text->own = own_history(room, levels, num_levels);
  if (text->own != nullptr) return text;
  delete text;
  return nullptr;
}

void suffix_text_free(void* handle) {
  auto* text = static_cast<SuffixText*>(handle);
  if (text == nullptr) return;
  history_free(text->own);
  delete text;
}

// The text has gone on by `fresh`. Up to k (64 at most) guesses on what comes next, from itself or from `pool` (nullptr: no
// piece of it is of `scope`), whichever promises more; -1: no memory.
int suffix_guess(void* handle, void* trust_handle, void* pool, uint32_t scope, const int32_t* fresh, uint32_t num_fresh,
                 int max_found, int max_steps, int k, double bar, int64_t* tokens, double* probabilities) {
  auto& text = *static_cast<SuffixText*>(handle);
  auto& trust = *static_cast<Trust*>(trust_handle);
  for (int source = 0; source < 2; ++source) {
    text.paths[source].settle(fresh, static_cast<int>(num_fresh), text.luck[source]);
    text.paths[source].clear();
  }
  if (!text.read(fresh, num_fresh)) return -1;
  if (text.tokens.empty()) return 0;
  k = std::min(k, kMaxK);
  text.find(0, trust, text.own, 0, max_found, max_steps, k, bar);
  if (pool != nullptr) text.find(1, trust, static_cast<History*>(pool), scope, max_found, max_steps, k, bar);
  const Path& best = text.paths[1].worth() > text.paths[0].worth() ? text.paths[1] : text.paths[0];
  return best.write(tokens, probabilities);
}

// The arrays stay the caller's: of 2^n slots, at least one of them empty.
void* backoff_make(const uint32_t* checks, const uint32_t* tokens, const uint8_t* chances, uint64_t num_slots, int order) {
  return new Backoff{checks, tokens, chances, num_slots - 1, order};
}

void backoff_free(void* table) { delete static_cast<Backoff*>(table); }

void* backoff_text_make() { return new BackoffText(); }
void backoff_text_free(void* text) { delete static_cast<BackoffText*>(text); }

// The text has gone on by `fresh`. Up to k (64 at most) guesses, each from the ones before it.
int backoff_guess(void* table_handle, void* handle, const int32_t* fresh, uint32_t num_fresh, int k, double bar,
                  int64_t* tokens, double* probabilities) {
  auto& table = *static_cast<Backoff*>(table_handle);
  auto& text = *static_cast<BackoffText*>(handle);
  text.path.settle(fresh, static_cast<int>(num_fresh), text.luck);
  text.path.clear();
  uint64_t* context = text.context;
  const int news = static_cast<int>(std::min<uint32_t>(num_fresh, table.order));
  const int kept = std::min(text.length, table.order - news);
  std::memmove(context, context + text.length - kept, kept * sizeof(uint64_t));
  for (int i = 0; i < news; ++i) context[kept + i] = static_cast<uint32_t>(fresh[num_fresh - news + i]);
  text.length = kept + news;
  int length = text.length;
  const double factor = text.luck.factor();
  while (text.path.count() < std::min(k, kMaxK)) {
    int known = 0;
    const int64_t slot = table.next(context, length, &known);
    if (slot < 0) break;
    const double chance = table.chances[slot] / 255.0;
    if (!text.path.add(table.tokens[slot], table.cell(known, chance), chance, factor, bar)) break;
    context[length++] = table.tokens[slot];
  }
  return text.path.write(tokens, probabilities);
}

}  // extern "C"
