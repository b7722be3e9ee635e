// The depths of the next rounds: controller.py.
#pragma once
#include <optional>

#include "allocation.h"

namespace {

constexpr size_t kCrowd = 8;
constexpr uint64_t kRest = 4;
constexpr double kFoundKeep = 0.05;
constexpr int64_t kJudgedOver = 32;
constexpr double kLoss = 0.02;
constexpr int64_t kMostRarely = 16;
constexpr double kStrong = 0.6;
constexpr double kLookUp = 6e-5, kLookUpStep = 1.5e-4;
constexpr int64_t kLookedUpLook = 16;

inline void judge(Track& track, const RowFact& row, const Prices& prices, int64_t sequences) {
  const double plain_s = prices.step_s(0);
  const double cost_s = prices.step_s(row.drafted) - plain_s + kLookUp + kLookUpStep / sequences;
  const double gain_s = row.agreed * plain_s / sequences - cost_s;
  ++track.judged;
  track.worth_s += (gain_s - track.worth_s) / std::min(track.judged, kJudgedOver);
  if (track.judged < kJudgedOver) return;
  if (track.worth_s < -kLoss * plain_s / sequences) {
    track.every = std::min(track.every * (track.every == 1 ? 4 : 2), kMostRarely);
    track.judged = 0;
    track.worth_s = 0.0;
  } else {
    track.every = 1;
  }
}

inline bool is_quiet(const Track& track, const RowFact& row) {
  return track.every > 1 && !track.on && track.since > kOffDwell && row.asked == 0 && !row.has_look;
}

inline bool rests(Track& track, const RowFact& row) {
  if (row.found > 0 && row.chances[0] >= kStrong) {
    track.every = 1;
    track.judged = 0;
    track.worth_s = 0.0;
    return false;
  }
  track.turn = (track.turn + 1) % track.every;
  return track.turn != 0;
}

class Deciding {
 public:
  // `state` is after learning. Its tracks of this step's rows are marked `mine`, as they are on return.
  Deciding(Model& model, State& state, const std::vector<Named>& drafters, Decisions& decisions)
      : model_(model), state_(state), drafters_(drafters), decisions_(decisions) {}

  void decide(const PackedStep& step, const std::vector<RowFact>& rows) {
    const bool crowded = rows.size() > kCrowd;
    sequences_ = std::max<int64_t>(step.running, 1);
    double fixed_rows = 0.0, fixed_tokens = 0.0;
    for (const RowFact& row : rows) {
      if (Tracks::Entry* entry = state_.tracks.find(row.id)) entry->mine = true;
    }
    for (const RowFact& row : rows) {
      if (row.finished) continue;
      if (row.drafter < 0) {
        decisions_.add(row.id, 0, false, kPlain, 1.0, 0.0, 0.0);
        continue;
      }
      Track& track = state_.tracks.find(row.id)->track;
      int64_t bound = row.bound();
      if (row.looked && !row.fixed && row.asked == 0) judge(track, row, one_prices(), sequences_);
      if (track.every > 1) rarely_.push_back({&row, &track, bound});
      if (row.found >= 0) {
        if (row.alone || (row.found > 0 && !better(row, track, bound))) {
          looked_up_.push_back({&row, &track, bound});
          track.rows = row.found;
          track.tokens = 1.0 + total(row.chances, row.found);
          fixed_rows += track.rows;
          fixed_tokens += track.tokens - 1.0;
          continue;
        }
      } else if (!row.fixed && (row.alone || is_quiet(track, row))) {
        track.rows = 0.0;
        track.tokens = 1.0;
        ++track.since;
        decisions_.add(row.id, 0, false, kCost, 1.0, 0.0, 0.0);
        continue;
      }
      if (row.fixed || bound <= 0) {
        bound = std::max<int64_t>(bound, 0);
        track.on = bound > 0;
        track.rows = static_cast<double>(bound);
        track.tokens = 1.0;
        fixed_rows += bound;
        decisions_.add(row.id, bound, bound > 0, bound == row.k_max ? kFixed : kRoom, 0.0, 0.0, 0.0);
      } else if (track.suspended) {
        suspended_.push_back({&row, &track, bound});
      } else if (crowded && !track.on && !(row.has_look && row.look_agreed != 0) && track.since > kOffDwell &&
                 (static_cast<uint64_t>(track.since) + static_cast<uint64_t>(row.id)) % kRest != 0) {
        resting_.push_back({&row, &track, bound});
      } else {
        asking_.push_back({&row, &track, bound});
      }
    }
    for (Tracks::Entry& entry : state_.tracks.entries) {
      if (entry.track.rows != 0.0 && !entry.mine) {
        fixed_rows += entry.track.rows;
        fixed_tokens += entry.track.tokens - 1.0;
      }
      entry.mine = false;
    }
    double rate = 0.0, found_gain = state_.found_gain;
    if (!looked_up_.empty() && asking_.empty()) {
      const Prices prices(model_, state_, sequences_, sequences_ + ceiling(fixed_rows) + 1);
      const double plain_rate = over(static_cast<double>(sequences_), prices.step_s(0) + state_.quiet_gap_s);
      const double taken_s = prices.step_s(whole(fixed_rows + 0.5)) + state_.quiet_gap_s;
      found_gain += kFoundKeep * (over(over(sequences_ + fixed_tokens, taken_s), plain_rate) - found_gain);
      rate = found_gain * plain_rate;
    }
    if (!asking_.empty()) {
      const bool guarded = step.running_plain != 0 || !suspended_.empty();
      rate = Allocation(model_, state_, drafters_).allocate(asking_, decisions_, sequences_, fixed_rows, fixed_tokens, guarded);
    }
    if (!suspended_.empty() || !resting_.empty() || !looked_up_.empty()) {
      const double plain_s = Prices(model_, state_, sequences_, sequences_).step_s(0);
      int64_t company = 0;
      for (const Asking& one : asking_) company += one.track->on;
      for (const auto& [row, track, bound] : suspended_) idle(decisions_, drafter_of(*row), *track, *row, plain_s, kSuspended, sequences_, company);
      for (const auto& [row, track, bound] : resting_) idle(decisions_, drafter_of(*row), *track, *row, plain_s, track->reason, sequences_, company);
      for (const auto& [row, track, bound] : looked_up_) looked_up(*row, *track, plain_s);
    }
    for (const auto& [row, track, bound] : rarely_) {
      if (rests(*track, *row)) decision_of(row->id).rest = 1;
    }
    state_.rate = rate;
    state_.found_gain = found_gain;
  }

 private:
  Model& model_;
  State& state_;
  const std::vector<Named>& drafters_;
  Decisions& decisions_;
  int64_t sequences_ = 1;
  std::optional<Prices> one_prices_;
  std::vector<Asking> asking_, suspended_, resting_, looked_up_, rarely_;

  const Drafter& drafter_of(const RowFact& row) const { return *drafters_[row.drafter].after; }

  // Of steps in which one sequence has further rows.
  const Prices& one_prices() {
    if (!one_prices_) one_prices_.emplace(model_, state_, sequences_, sequences_ + kMaxK + 1);
    return *one_prices_;
  }

  PackedDecision& decision_of(int64_t id) {
    int64_t at = 0;
    while (decisions_.out[at].id != id) ++at;  // of so few rows that this is nothing
    return decisions_.out[at];
  }

  // Whether asking the draft tier promises more than what was looked up.
  bool better(const RowFact& row, const Track& track, int64_t bound) {
    if (track.suspended) return false;
    expect(bound >= 0);
    const Prices& prices = one_prices();
    const Drafter& drafter = drafter_of(row);
    const View& view = drafter.view();
    const double plain_s = prices.step_s(0);
    const double rate = over(state_.found_gain * sequences_, plain_s + state_.quiet_gap_s);
    double here = 0.0, there = 0.0, gain = 0.0;
    for (int position = 1; position <= row.found; ++position) {
      gain += row.chances[position - 1];
      here = std::max(here, gain - rate * (prices.step_s(position) - plain_s));
    }
    gain = 0.0;
    const double fill = view.fill(track);
    double survival[kMaxK];
    const int length = view.survival(track, row.own_prior(), bound, kFewestWorth, survival);
    for (int position = 1; position <= length; ++position) {
      gain += survival[position - 1];
      const double exposed_s = std::max(drafter.track.exposed_s + view.slope_s * (position - drafter.track.k), 0.0);
      const double net = fill * (gain - rate * (prices.step_s(position) - plain_s)) - rate * exposed_s;
      there = std::max(there, net);
    }
    return there > here + (kOn - 1.0);
  }

  void looked_up(const RowFact& row, Track& track, double plain_s) {
    const Reason reason = row.found > 0 ? kLookedUp : kNotFound;
    int64_t k = 0;
    track.on = false;
    if (!row.alone && !row.fixed && row.bound() > 0) {
      ++track.since;
      const auto [tokens, least] = look_cost(drafter_of(row), row, plain_s, sequences_, 0);
      if (track.since % std::max(least, kLookedUpLook) == 0) k = tokens;
    }
    decisions_.add(row.id, k, false, reason, track.tokens, 0.0, 0.0);
  }
};

}  // namespace
