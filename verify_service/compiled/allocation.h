// How many tokens each sequence asks its drafter for: allocation.py.
#pragma once
#include "learning.h"

namespace {

constexpr double kOn = 1.05, kOff = 1.00;
constexpr double kTailShare = 1.10;
constexpr double kProbeShare = 0.02;
constexpr double kFewestWorth = 0.02;
constexpr double kMessage = 1e-4;
constexpr double kThought = 1.5e-5, kThoughtShare = 0.005;
constexpr double kHardlyWorth = 0.5;
constexpr double kHardlyEver = 1e9;
constexpr int64_t kSlowestCheap = 6;
constexpr int64_t kLookTokens = 2;
constexpr int64_t kDepthsTried[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48};
constexpr double kOnShare = -1.0 / kOn;
constexpr int64_t kEntries = 512;
constexpr double kHopeless = 0.85;

struct Asking {
  const RowFact* row;
  Track* track;
  int64_t bound;
};

struct Entry {
  double negative;
  int32_t index, position;
  double reach;

  bool operator<(const Entry& other) const {
    if (negative != other.negative) return negative < other.negative;
    return index != other.index ? index < other.index : position < other.position;
  }
};

inline void add_entry(std::vector<Entry>& entries, const Entry& entry) {
  expect(entry.negative == entry.negative);  // no order among what is no number
  entries.push_back(entry);
}

// Decisions in the order in which Python puts them into its dict.
struct Decisions {
  PackedDecision* out;
  int64_t count = 0;

  PackedDecision& add(int64_t id, int64_t k, bool wait, Reason reason, double expected, double worth_s, double cost_s) {
    PackedDecision& made = out[count++];
    made = {id, expected, worth_s, cost_s, static_cast<int32_t>(k), reason, wait, 0};
    return made;
  }
};

// (tokens a drafter is asked for to look at it, least number of rounds between two looks)
inline std::pair<int64_t, int64_t> look_cost(const Drafter& drafter, const RowFact& row, double plain_s, int64_t sequences, int64_t company) {
  int64_t k = row.bound();
  const DrafterTrack& track = drafter.track;
  double draft_s = track.draft_s;
  const double slope_s = drafter.view().slope_s;
  if (slope_s * k > kMessage) {
    k = std::min(k, kLookTokens);
    draft_s = std::max(draft_s + slope_s * (k - track.k), 0.0);
  }
  draft_s = std::max(draft_s, track.look_s);
  const double reading_s = track.read_s * row.unread;
  const double asking = (draft_s + kMessage) / (kProbeShare * (1 + company)) + reading_s / kProbeShare;
  const double thinking = sequences * kThought / kThoughtShare;
  return {k, ceiling(std::min(over(std::max(asking, thinking), plain_s), kHardlyEver))};
}

inline PackedDecision& idle(Decisions& decisions, const Drafter& drafter, Track& track, const RowFact& row, double plain_s, Reason reason,
                            int64_t sequences, int64_t company, double worth_s = 0.0, double cost_s = 0.0) {
  if (track.on) {
    track.on = false;
    track.since = 0;
    track.next_probe = track.probe_gap = kFirstProbe;
  } else {
    ++track.since;
  }
  track.rows = 0.0;
  track.tokens = 1.0;
  track.reason = reason;
  if (track.next_probe > 0) {
    --track.next_probe;
    return decisions.add(row.id, 0, false, reason, 1.0, worth_s, cost_s);
  }
  auto [k, least] = look_cost(drafter, row, plain_s, sequences, company);
  if (track.suspended && track.since <= 2 * kZeroRounds) least = 1;
  track.next_probe = std::min<int64_t>(std::max(track.probe_gap, least), kLastProbe);
  track.probe_gap = std::min(2 * track.probe_gap, std::max(2 * least, kSlowestCheap));
  return decisions.add(row.id, k, false, reason, 1.0, worth_s, cost_s);
}

// A prefix of the entries of the `names` first drafters whose positions lie before `depth`.
struct Choice {
  double rate = 0.0;
  int64_t count = 0;
  double rows = 0.0;
  bool tail = false;
  int64_t names = 0, depth = 0;
};

class Allocation {
 public:
  Allocation(Model& model, const State& state, const std::vector<Named>& drafters) : model_(model), state_(state), drafters_(drafters) {}

  // Tokens per second expected; the others' rows and tokens are given.
  double allocate(const std::vector<Asking>& asking, Decisions& decisions, int64_t sequences, double rest_rows, double rest_tokens, bool guarded) {
    const Prices first(model_, state_, sequences, sequences + ceiling(rest_rows) + 2);
    const int64_t rest_at = whole(rest_rows + 0.5);
    const double base_s = first.step_s(0), rest_s = first.step_s(rest_at);
    const double base = sequences + rest_tokens;
    const double plain_rate = over(base, rest_s + state_.quiet_gap_s);
    const double next_s = first.step_s(rest_at + 1) - rest_s;
    const double least = std::max(kFewestWorth, kHardlyWorth * plain_rate * next_s);
    const int64_t count = static_cast<int64_t>(asking.size());
    const int64_t deepest = std::min<int64_t>(std::max<int64_t>(8, kEntries / count), kMaxK);
    std::vector<double> survivals(count * deepest), fills(count);
    std::vector<int> lengths(count);
    std::vector<Entry> entries;
    bool any_on = false, settled = false;
    for (int64_t index = 0; index < count; ++index) {
      const auto& [row, track, bound] = asking[index];
      const View& view = view_of(*row);
      const double fill = fills[index] = view.fill(*track);
      double* survival = &survivals[index * deepest];
      const int length = lengths[index] = view.survival(*track, row->own_prior(), std::min(deepest, bound), least, survival);
      double share = -1.0;
      if (track->on) {
        any_on = true;
        settled |= track->since >= kOnDwell;
      } else if (track->since < kOffDwell) {
        continue;
      } else {
        share = kOnShare;
      }
      const int taken = survival[length - 1] < least ? length - 1 : length;
      for (int position = 0; position < taken; ++position) {
        add_entry(entries, {survival[position] * share, static_cast<int32_t>(index), position, fill * view.reach[position]});
      }
    }
    std::sort(entries.begin(), entries.end());
    const Prices prices(model_, state_, sequences, sequences + ceiling(rest_rows) + static_cast<int64_t>(entries.size()) + 2);
    const Choice best = best_of(asking, entries, prices, rest_rows, base, guarded ? kTailShare * base_s : 0.0);
    std::vector<int64_t> depths(count, 0);
    int64_t company = depths_of(best, asking, entries, depths);
    const bool any = company > 0;
    const double needed = !any_on ? kOn : settled ? kOff : kOff - (kOn - kOff);
    const bool pays = any && best.rate >= needed * plain_rate;
    const double rate = pays ? best.rate : plain_rate;
    const int64_t at = whole((pays ? best.rows : rest_rows) + 0.5);
    const double cost_s = prices.step_s(at + 1) - prices.step_s(at);
    if (!pays) company = 0;
    for (int64_t index = 0; index < count; ++index) {
      const auto& [row, track, bound] = asking[index];
      const int64_t k = pays ? depths[index] : 0;
      const double* survival = &survivals[index * deepest];
      const double worth_s = k < lengths[index] ? over(survival[k], rate) : 0.0;
      const View& view = view_of(*row);
      if (k == 0) {
        Reason reason = kCost;
        if (!track->on && track->since < kOffDwell) {
          reason = kDwell;
        } else if (best.tail) {
          reason = kTail;
        } else if (!pays && (any || over(fills[index] * total(survival, lengths[index]), rate) > cost_s)) {
          reason = kAsking;
        }
        idle(decisions, *drafters_[row->drafter].after, *track, *row, base_s, reason, sequences, company, worth_s, cost_s);
        continue;
      }
      const Reason reason = k == bound ? (bound == row->k_max ? kAllOfIt : kRoom) : best.tail ? kTail : kCost;
      double rows = 0.0, tokens = 1.0;
      for (int64_t position = 0; position < std::min<int64_t>(k, lengths[index]); ++position) {
        const double there = fills[index] * view.reach[position];
        rows += there;
        tokens += there * survival[position];
      }
      track->since = track->on ? track->since + 1 : 0;
      track->on = true;
      track->rows = rows;
      track->tokens = tokens;
      decisions.add(row->id, k, true, reason, tokens, worth_s, cost_s);
    }
    return rate;
  }

 private:
  Model& model_;
  const State& state_;
  const std::vector<Named>& drafters_;
  std::vector<int64_t> rank_;  // by drafter of the step: its place in order of exposed time

  const View& view_of(const RowFact& row) const { return drafters_[row.drafter].after->view(); }

  bool among(const Choice& choice, const std::vector<Asking>& asking, const Entry& entry) const {
    return entry.position < choice.depth && rank_[asking[entry.index].row->drafter] < choice.names;
  }

  // How many sequences draft.
  int64_t depths_of(const Choice& choice, const std::vector<Asking>& asking, const std::vector<Entry>& entries, std::vector<int64_t>& depths) const {
    int64_t left = choice.count, drafting = 0;
    for (size_t at = 0; left > 0; ++at) {
      const Entry& entry = entries[at];
      if (!among(choice, asking, entry)) continue;
      drafting += depths[entry.index] == 0;
      depths[entry.index] = entry.position + 1;
      --left;
    }
    return drafting;
  }

  Choice best_of(const std::vector<Asking>& asking, const std::vector<Entry>& entries, const Prices& prices, double rows, double tokens, double guard_s) {
    int64_t longest = 0;
    for (const Entry& entry : entries) longest = std::max<int64_t>(longest, entry.position);
    ++longest;
    std::vector<int64_t> deepest(drafters_.size(), 0);
    for (const Asking& one : asking) deepest[one.row->drafter] = std::max(deepest[one.row->drafter], one.bound);
    std::vector<int64_t> names;
    for (size_t i = 0; i < deepest.size(); ++i) {
      if (deepest[i] == 0) continue;
      expect(!std::isnan(drafters_[i].after->track.exposed_s));
      names.push_back(static_cast<int64_t>(i));
    }
    // UTF-8 sorts as Python's strings do.
    std::sort(names.begin(), names.end(), [&](int64_t a, int64_t b) {
      const Drafter &left = *drafters_[a].after, &right = *drafters_[b].after;
      if (left.track.exposed_s != right.track.exposed_s) return left.track.exposed_s < right.track.exposed_s;
      return *left.name < *right.name;
    });
    rank_.assign(drafters_.size(), kMost);
    for (size_t i = 0; i < names.size(); ++i) rank_[names[i]] = static_cast<int64_t>(i);
    Choice best;
    bool chosen = false;
    int64_t most = 0;
    double steepest = 0.0;
    for (size_t last = 0; last < names.size(); ++last) {
      most = std::max(most, deepest[names[last]]);
      const double slope_s = drafters_[names[last]].after->view().slope_s;
      steepest = last == 0 ? slope_s : std::max(steepest, slope_s);
      std::vector<int64_t> depths;
      if (!(steepest * most < kMessage)) {
        for (const int64_t depth : kDepthsTried) {
          if (depth < most) depths.push_back(depth);
        }
      }
      depths.push_back(most);
      for (size_t i = 0; i < depths.size() && (i == 0 || depths[i - 1] < longest); ++i) {
        double exposed_s = 0.0;
        for (size_t j = 0; j <= last; ++j) {
          const Drafter& drafter = *drafters_[names[j]].after;
          const double more_s = drafter.view().slope_s * (std::min(depths[i], deepest[names[j]]) - drafter.track.k);
          exposed_s = std::max(exposed_s, drafter.track.exposed_s + more_s);
        }
        Choice choice;
        choice.names = static_cast<int64_t>(last) + 1;
        choice.depth = depths[i] < longest ? depths[i] : longest;
        choose(choice, asking, entries, prices, rows, tokens, exposed_s + state_.quiet_gap_s, guard_s);
        if (!chosen || choice.rate > best.rate) best = choice;
        chosen = true;
      }
    }
    return best;
  }

  void choose(Choice& choice, const std::vector<Asking>& asking, const std::vector<Entry>& entries, const Prices& prices, double rows, double tokens,
              double exposed_s, double guard_s) const {
    choice.rows = rows;
    bool tail = false;
    int64_t count = 0, at = -1;
    double step_s = 0.0;
    for (const Entry& entry : entries) {
      if (!among(choice, asking, entry)) continue;
      rows += entry.reach;
      tokens -= entry.negative * entry.reach;
      const int64_t now = whole(rows + 0.5);
      if (at != now) {
        at = now;
        step_s = prices.step_s(now);
        if (guard_s != 0.0 && step_s > guard_s) {
          tail = true;
          break;
        }
      }
      ++count;
      const double rate = over(tokens, step_s + exposed_s);
      if (rate > choice.rate) {
        choice.rate = rate;
        choice.count = count;
        choice.rows = rows;
      } else if (rate < kHopeless * choice.rate) {
        break;
      }
    }
    choice.tail = tail && choice.count == count;
  }
};

}  // namespace
