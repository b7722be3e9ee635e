// What is believed of a sequence and of a drafter: belief.py, to the last bit. What everything means is said there.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "numbers.h"

namespace {

constexpr int kZeroRounds = 8;
constexpr int kOnDwell = 4, kOffDwell = 2;
constexpr int kFirstProbe = 2, kLastProbe = 64;
constexpr int kDepths = 16;
constexpr double kFirstExposed = 5e-4;

constexpr double kKeepToken = 0.99, kKeep = 0.93;
constexpr double kKeepFill = 0.96, kKeepDrafter = 0.998, kKeepShared = 0.99, kKeepLength = 0.98;
constexpr double kMoodStrength = 8.0;
constexpr double kShift = 5.0;
constexpr double kAlarm = 120.0;
constexpr double kAfterChange = 0.2;
constexpr double kKeepUnseen = 0.97;
constexpr double kPriorMean = 0.6, kPriorStrength = 2.0;
constexpr double kFillMean = 0.6, kFillStrength = 2.0;
constexpr double kStrength = 3.0, kMostStrength = 16.0;
constexpr double kCaution = 16.0;
constexpr double kLeastRate = 0.1, kForgetCost = 0.01;
constexpr double kDearToken = 0.01;
constexpr int kReadMany = 64;

enum Mood { kNothing, kPart, kAll };

// In the order of DepthReason's members.
enum Reason : int32_t {
  kUnsaid, kPlain, kFixed, kAllOfIt, kCost, kTail, kAsking, kSuspended, kDwell, kRoom, kLookedUp, kNotFound, kReasons
};

// Somebody else's numbers, for as long as the call lasts.
struct Prior {
  double mean, strength;
  const double* by_position;
  int64_t count;
};

struct Look {
  int64_t length, checked, agreed, read;
  double work_s;
};

struct OwnPrior {
  double mean, strength;
  std::vector<double> by_position;

  explicit OwnPrior(const Prior& given)
      : mean(given.mean), strength(given.strength), by_position(given.by_position, given.by_position + given.count) {}
  Prior view() const { return {mean, strength, by_position.data(), static_cast<int64_t>(by_position.size())}; }
};

using Name = std::shared_ptr<const std::string>;

struct Track {
  Name drafter;
  double accepted = 0.0, rejected = 0.0, filled = 0.0, empty = 0.0;
  int64_t mood = kAll;
  double moods[12] = {};
  int64_t zero_rounds = 0;
  bool suspended = false, on = false;
  int64_t since = kOffDwell, next_probe = 0, probe_gap = kFirstProbe;
  double rows = 0.0, tokens = 0.0;
  Reason reason = kUnsaid;
  std::shared_ptr<const OwnPrior> prior;
  int64_t judged = 0;
  double worth_s = 0.0;
  int64_t every = 1, turn = 0;
  double better = 1.0, worse = 1.0;
};

struct DrafterTrack {
  double accepted = 0.0, rejected = 0.0, filled = 0.0, empty = 0.0;
  double seen[kDepths] = {}, right[kDepths] = {}, told[kDepths] = {};
  double moods[9] = {}, fills[9] = {};
  double reached[kDepths] = {}, wanted[kDepths] = {};
  double exposed_s = kFirstExposed, draft_s = 0.0, k = 0.0, weight = 0.0, k_square = 0.0, k_time = 0.0;
  double look_s = 0.0, read_s = 0.0;
};

inline double inside(double rate) { return rate < 0.01 ? 0.01 : rate > 0.99 ? 0.99 : rate; }

inline double bounded(double rate) { return rate < 0.01 ? 0.01 : std::min(rate, 0.99); }

inline double total(const double* values, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

inline double odds_ratio(double seen, double right, double told) {
  if (seen < 1.0) return 1.0;
  const double expected = inside(told / seen);
  const double found = inside((right + kCaution * expected) / (seen + kCaution));
  const double ratio = over(found * (1.0 - expected), (1.0 - found) * expected);
  return ratio < 0.1 ? 0.1 : std::min(ratio, 10.0);
}

// What follows from a drafter's counts, all at once: some twenty ratios.
struct View {
  double mean, fill_mean, slope_s;
  bool always;
  double moods[3], fills[3];
  double profile[kMaxK], reach[kMaxK];

  explicit View(const DrafterTrack& drafter) {
    mean = inside(over(drafter.accepted + kPriorStrength * kPriorMean, drafter.accepted + drafter.rejected + kPriorStrength));
    fill_mean = over(drafter.filled + kFillStrength * kFillMean, drafter.filled + drafter.empty + kFillStrength);
    always = drafter.empty == 0.0;
    slope_s = slope(drafter);
    for (int i = 0; i < 3; ++i) {
      const double *mood = drafter.moods + 3 * i, *fill = drafter.fills + 3 * i;
      moods[i] = odds_ratio(mood[0], mood[1], mood[2]);
      fills[i] = odds_ratio(fill[0], fill[1], fill[2]);
    }
    for (int i = 0; i < kDepths; ++i) {
      profile[i] = odds_ratio(drafter.seen[i], drafter.right[i], drafter.told[i]);
      reach[i] = over(drafter.reached[i] + 1.0, drafter.wanted[i] + 1.0);
    }
    std::fill(profile + kDepths, profile + kMaxK, profile[kDepths - 1]);
    std::fill(reach + kDepths, reach + kMaxK, reach[kDepths - 1]);
  }

  double overall_rate(const Track& track, const Prior* given) const {
    double prior_mean = mean, strength = kStrength;
    if (given != nullptr) {
      prior_mean = inside(given->count > 0 ? total(given->by_position, given->count) / given->count : given->mean);
      strength = std::min(std::max(given->strength, 0.5), kMostStrength);
    }
    return bounded(over(track.accepted + prior_mean * strength, track.accepted + track.rejected + strength));
  }

  double in_mood(const Track& track, double rate) const {
    const double odds = over(rate, 1.0 - rate) * moods[track.mood];
    const double expected = over(odds, 1.0 + odds);
    const double *own = track.moods + 4 * track.mood;
    return bounded(over(own[0] + expected * kMoodStrength, own[0] + own[1] + kMoodStrength));
  }

  double overall_fill(const Track& track) const {
    return bounded(over(track.filled + fill_mean * kFillStrength, track.filled + track.empty + kFillStrength));
  }

  double fill(const Track& track) const {
    if (always) return 1.0;
    const double rate = overall_fill(track);
    const double odds = over(rate, 1.0 - rate) * fills[track.mood];
    const double expected = over(odds, 1.0 + odds);
    const double *own = track.moods + 4 * track.mood;
    return over(own[2] + expected * kMoodStrength, own[2] + own[3] + kMoodStrength);
  }

  // Writes up to `depth` chances, kMaxK at most; how many.
  int survival(const Track& track, const Prior* given, int64_t depth, double least, double* found) const {
    const double rate = in_mood(track, overall_rate(track, given));
    const double odds = over(rate, 1.0 - rate);
    const bool listed = given != nullptr && given->count > 0;
    double listed_mean = 0.0;
    if (listed) {
      double sum = 0.0;
      for (int64_t i = 0; i < given->count; ++i) sum += inside(given->by_position[i]);
      listed_mean = inside(sum / given->count);
    }
    double alive = 1.0;
    int count = 0;
    while (count < depth) {
      double factor = profile[count];
      if (listed) {
        const double one = inside(given->by_position[std::min<int64_t>(count, given->count - 1)]);
        factor = over(over(one, 1.0 - one) * (1.0 - listed_mean), listed_mean);
      }
      const double there = odds * factor;
      alive *= over(there, 1.0 + there);
      found[count++] = alive;
      if (alive < least) break;
    }
    return count;
  }

 private:
  static double slope(const DrafterTrack& drafter) {
    if (drafter.weight < 1.0 || drafter.k <= 0.0) return 0.0;
    const double variance = drafter.k_square - drafter.k * drafter.k;
    const double in_proportion = drafter.draft_s / drafter.k;
    if (variance <= 0.25) return in_proportion;
    const double fitted = (drafter.k_time - drafter.k * drafter.draft_s) / variance;
    return std::min(std::max(fitted, 0.0), in_proportion);
  }
};

// A drafter of a state: changed by the step that makes it, never after that.
struct Drafter {
  Name name;
  DrafterTrack track;
  mutable std::unique_ptr<const View> seen;  // worked out when it is first asked for

  Drafter(Name called, const DrafterTrack& known) : name(std::move(called)), track(known) {}
  const View& view() const {
    if (!seen) seen = std::make_unique<const View>(track);
    return *seen;
  }
};

// --- learning: `track` and `drafter` are changed, `view` is of before the step ---

inline void count_more(double* odds, int64_t trials, int64_t right, double told) {
  odds[0] = kKeepShared * odds[0] + trials;
  odds[1] = kKeepShared * odds[1] + right;
  odds[2] = kKeepShared * odds[2] + trials * told;
}

inline void notice(Track& track, double rate, int64_t agreed, int64_t wrong) {
  const double odds = over(rate, 1.0 - rate);
  const double trials = static_cast<double>(agreed + wrong), right = static_cast<double>(agreed);
  const double better =
      track.better * std::pow((1.0 + odds) / (1.0 + kShift * odds), trials) * std::pow(kShift, right);
  const double worse = track.worse * std::pow((1.0 + odds) / (1.0 + odds / kShift), trials) / std::pow(kShift, right);
  if (better < kAlarm && worse < kAlarm) {
    track.better = std::max(better, 1.0);
    track.worse = std::max(worse, 1.0);
    return;
  }
  track.better = track.worse = 1.0;
  track.accepted *= kAfterChange;
  track.rejected *= kAfterChange;
  for (int at = 0; at < 12; at += 4) {
    track.moods[at] *= kAfterChange;
    track.moods[at + 1] *= kAfterChange;
  }
}

inline void learn_trials(Track& track, DrafterTrack& drafter, const View& view, int64_t length, int64_t agreed, const Prior* prior) {
  const double overall = view.overall_rate(track, prior);
  const double told = view.in_mood(track, overall);
  const int64_t wrong = agreed < length ? 1 : 0;
  const int64_t trials = agreed + wrong;
  const int64_t mood = track.mood;
  notice(track, overall, agreed, wrong);
  const double keep = trials <= kMaxK ? std::max(std::pow(kKeepToken, static_cast<double>(trials)), kKeep) : kKeep;
  double* own = track.moods + 4 * mood;
  own[0] = keep * own[0] + agreed;
  own[1] = keep * own[1] + wrong;
  track.accepted = keep * track.accepted + agreed;
  track.rejected = keep * track.rejected + wrong;
  count_more(drafter.moods + 3 * mood, trials, agreed, overall);
  track.mood = agreed == 0 ? kNothing : wrong ? kPart : kAll;
  for (int64_t i = 0; i < std::min<int64_t>(trials, kDepths); ++i) {
    drafter.seen[i] = kKeepShared * drafter.seen[i] + 1.0;
    drafter.told[i] = kKeepShared * drafter.told[i] + told;
  }
  for (int64_t i = 0; i < std::min<int64_t>(agreed, kDepths); ++i) drafter.right[i] = kKeepShared * drafter.right[i] + 1.0;
  if (wrong && agreed < kDepths) drafter.right[agreed] = kKeepShared * drafter.right[agreed];
  if (length < kDepths) {
    drafter.seen[length] *= kKeepUnseen;
    drafter.right[length] *= kKeepUnseen;
    drafter.told[length] *= kKeepUnseen;
  }
  drafter.accepted = kKeepDrafter * drafter.accepted + agreed;
  drafter.rejected = kKeepDrafter * drafter.rejected + wrong;
}

inline void learn_filled(Track& track, DrafterTrack& drafter, const View& view, int64_t asked, int64_t proposed) {
  const int filled = proposed > 0 ? 1 : 0, empty = 1 - filled;
  count_more(drafter.fills + 3 * track.mood, 1, filled, view.overall_fill(track));
  double* own = track.moods + 4 * track.mood;
  own[2] = kKeepFill * own[2] + filled;
  own[3] = kKeepFill * own[3] + empty;
  track.filled = kKeepFill * track.filled + filled;
  track.empty = kKeepFill * track.empty + empty;
  drafter.filled = kKeepDrafter * drafter.filled + filled;
  drafter.empty = kKeepDrafter * drafter.empty + empty;
  if (!filled) return;
  for (int64_t i = 0; i < std::min<int64_t>(asked, kDepths); ++i) {
    drafter.wanted[i] = kKeepLength * drafter.wanted[i] + 1.0;
    drafter.reached[i] = i < proposed ? kKeepLength * drafter.reached[i] + 1.0 : kKeepLength * drafter.reached[i];
  }
}

inline void waited_for(Track& track, DrafterTrack& drafter, const View& view, int64_t asked, int64_t proposed, int64_t drafted,
                       int64_t agreed, const Prior* prior) {
  learn_filled(track, drafter, view, asked, proposed);
  if (proposed <= 0) {
    track.mood = kNothing;
    return;
  }
  if (drafted == 0) return;
  learn_trials(track, drafter, view, drafted, agreed, prior);
  if (agreed != 0) {
    track.zero_rounds = 0;
    return;
  }
  ++track.zero_rounds;
  if (track.zero_rounds >= kZeroRounds && !track.suspended) {
    track.suspended = true;
    track.on = false;
    track.since = 0;
    track.next_probe = track.probe_gap = kFirstProbe;
  }
}

inline double smoothed(double before, double now, double first) {
  return before > 0.0 ? before + 0.25 * (std::min(now, 3.0 * before) - before) : std::min(now, first);
}

inline void looked_at(Track& track, DrafterTrack& drafter, const View& view, const Look& look, int64_t wanted, const Prior* prior) {
  if (look.read > kReadMany) {
    drafter.read_s = smoothed(drafter.read_s, std::max(look.work_s - drafter.look_s, 0.0) / look.read, kDearToken);
  } else if (look.work_s > 0.0) {
    drafter.look_s = smoothed(drafter.look_s, look.work_s, kDearToken * std::max<int64_t>(look.length, 1));
  }
  learn_filled(track, drafter, view, wanted, look.length);
  if (look.length == 0) {
    track.mood = kNothing;
    return;
  }
  if (look.agreed != 0 && track.suspended) {
    track.suspended = false;
    track.zero_rounds = 0;
    track.accepted *= 0.25;
    track.rejected *= 0.25;
  }
  learn_trials(track, drafter, view, look.checked, look.agreed, prior);
  if (look.agreed != 0) {
    track.since = std::max<int64_t>(track.since, kOffDwell);
    track.next_probe = std::min<int64_t>(track.next_probe, 1);
    track.probe_gap = kFirstProbe;
  }
}

inline void timed(DrafterTrack& drafter, double exposed_s, double draft_s, int64_t k) {
  drafter.weight += 1.0;
  const double rate = std::max(kLeastRate, over(1.0, drafter.weight));
  exposed_s = std::min(exposed_s, 3.0 * drafter.exposed_s + 5e-4);
  draft_s = std::min(draft_s, drafter.weight > 1.0 ? 3.0 * drafter.draft_s + 5e-4 : kDearToken * k);
  drafter.exposed_s += std::max(kLeastRate, over(1.0, 1.0 + drafter.weight)) * (exposed_s - drafter.exposed_s);
  drafter.draft_s += rate * (draft_s - drafter.draft_s);
  drafter.k += rate * (k - drafter.k);
  drafter.k_square += rate * (k * k - drafter.k_square);
  drafter.k_time += rate * (k * draft_s - drafter.k_time);
}

inline void unasked(DrafterTrack& drafter) {
  drafter.exposed_s += kForgetCost * (std::min(drafter.exposed_s, kFirstExposed) - drafter.exposed_s);
}

}  // namespace
