// What the controller reads, remembers and says: facts.py. RowFact, StepFacts, Decision, Ready and Kept lie in memory as
// native.py packs and unpacks them.
#pragma once
#include <vector>

#include "belief.h"

namespace {

constexpr int64_t kCountEdges[] = {1, 4, 10, 31};
constexpr double kExtraEdges[] = {0.0, 1.0, 2.0, 4.0, 8.0};
constexpr int kRegions = 5 * 6;

struct PackedRow {
  int64_t id, room, unread;
  int32_t drafter;  // which of the step's names; -1: its plan is plain
  int32_t k_max, asked, proposed, drafted, agreed;
  int32_t found;  // so many numbers; -1: not looked up
  int32_t prior;  // so many positions; -1: none
  uint8_t fixed, finished, alone, looked;
  int32_t has_look;
  int64_t look_length, look_checked, look_agreed, look_read;
  double look_work_s;
};
static_assert(sizeof(PackedRow) == 104);

struct PackedStep {
  int64_t num_sequences, num_rows, prompt_rows, running, running_plain;
  double context, forward_s, accept_s, gap_s, draft_s;
  int64_t num_decisions;  // written here
};
static_assert(sizeof(PackedStep) == 88);

struct PackedDecision {
  int64_t id;
  double expected_tokens, next_worth_s, next_cost_s;
  int32_t k, reason;
  uint8_t wait, rest;
};
static_assert(sizeof(PackedDecision) == 48);

struct PackedReady {
  int64_t id;
  int32_t length;
  int32_t survival;  // so many numbers; -1: the drafter says nothing
  uint8_t fixed;
};
static_assert(sizeof(PackedReady) == 24);

struct PackedKept {
  int64_t id;
  int32_t k, reason;  // reason -1: none
};
static_assert(sizeof(PackedKept) == 16);

// A row with what lies elsewhere: numbers of its own, its prior.
struct RowFact : PackedRow {
  const double* chances = nullptr;  // `found` of them
  Prior given;
  bool has_prior = false;

  const Prior* own_prior() const { return has_prior ? &given : nullptr; }
  int64_t bound() const { return std::min<int64_t>(room, k_max); }
  Look look() const { return {look_length, look_checked, look_agreed, look_read, look_work_s}; }
};

// Numbers that rows refer to, one after the other.
struct Numbers {
  const double* next;
  int64_t left;

  const double* take(int64_t count) {
    expect(within(count, 0, left));
    const double* taken = next;
    next += count;
    left -= count;
    return taken;
  }
};

// Sequences' tracks in the order in which they came, like a dict of Python.
class Tracks {
 public:
  struct Entry {
    int64_t id;
    Track track;
    bool mine = false, gone = false;
  };
  std::vector<Entry> entries;  // after `settle` none is gone

  Entry* find(int64_t id) {
    if (slots_.empty()) return nullptr;
    for (size_t at = place(id);; at = (at + 1) & (slots_.size() - 1)) {
      const uint32_t slot = slots_[at];
      if (slot == 0) return nullptr;
      Entry& entry = entries[slot - 1];
      if (entry.id == id && !entry.gone) return &entry;
    }
  }
  const Entry* find(int64_t id) const { return const_cast<Tracks*>(this)->find(id); }

  // Of an id that is not there. Ends what `find` gave.
  Track& add(int64_t id, Track track) {
    entries.push_back({id, std::move(track)});
    if (2 * entries.size() >= slots_.size()) {
      index();
    } else {
      put(entries.size());
    }
    return entries.back().track;
  }

  // Lets go of those that are gone. Ends what `find` gave.
  void settle() {
    const size_t before = entries.size();
    entries.erase(std::remove_if(entries.begin(), entries.end(), [](const Entry& entry) { return entry.gone; }), entries.end());
    if (entries.size() != before) index();
  }

 private:
  std::vector<uint32_t> slots_;  // open addressing; 0: nothing, else one more than an index

  size_t place(int64_t id) const {
    return static_cast<size_t>((static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull) >> 32) & (slots_.size() - 1);
  }
  void put(size_t number) {
    size_t at = place(entries[number - 1].id);
    while (slots_[at] != 0) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = static_cast<uint32_t>(number);
  }
  void index() {
    size_t size = 16;
    while (size < 4 * entries.size()) size *= 2;
    slots_.assign(size, 0);
    for (size_t number = 1; number <= entries.size(); ++number) put(number);
  }
};

// All that `decide` remembers. Changed by the step that makes it, never after that.
struct State {
  Tracks tracks;
  std::vector<std::shared_ptr<const Drafter>> drafters;  // the longest unused first
  double pace = 1.0;
  double regions[kRegions];
  double accept_row_s = 0.0, quiet_gap_s = 0.0, context = 256.0, rate = 0.0, found_gain = 1.0;

  State() { std::fill(regions, regions + kRegions, 1.0); }

  const Drafter& drafter(const Name& name) const {
    for (const auto& known : drafters) {
      if (known->name == name) return *known;
    }
    for (const auto& known : drafters) {
      if (*known->name == *name) return *known;
    }
    throw Unusual();
  }
};

}  // namespace
