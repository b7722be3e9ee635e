// The controller's state after a step: learning.py.
#pragma once
#include "prices.h"

namespace {

constexpr size_t kMostDrafters = 64;

// A drafter that the step names, before it and after it.
struct Named {
  Name name;
  std::shared_ptr<const Drafter> before;  // as it was, or of nothing at all
  std::shared_ptr<Drafter> after;
  int64_t deepest = 0;
};

// Takes the drafter out and puts it behind all others: the first ones are the longest unused.
inline void take(State& next, Named& named) {
  auto& drafters = next.drafters;
  const auto at = std::find_if(drafters.begin(), drafters.end(), [&](const auto& one) { return *one->name == *named.name; });
  if (at == drafters.end()) {
    named.before = std::make_shared<const Drafter>(named.name, DrafterTrack());
  } else {
    named.before = *at;
    named.name = named.before->name;
    drafters.erase(at);
  }
  named.after = std::make_shared<Drafter>(named.name, named.before->track);
  drafters.push_back(named.after);
}

inline void forget_unused(State& next, const std::vector<Named>& step) {
  auto& drafters = next.drafters;
  if (drafters.size() <= kMostDrafters) return;
  const auto is_used = [&](const Drafter& drafter) {
    for (const Named& named : step) {
      if (named.after.get() == &drafter) return true;
    }
    for (const auto& entry : next.tracks.entries) {
      if (!entry.gone && (entry.track.drafter == drafter.name || *entry.track.drafter == *drafter.name)) return true;
    }
    return false;
  };
  size_t spare = drafters.size() - kMostDrafters;
  const auto goes = [&](const auto& one) { return spare > 0 && !is_used(*one) && spare-- > 0; };
  // By hand: std::remove_if may ask in any order.
  std::vector<std::shared_ptr<const Drafter>> kept;
  for (const auto& one : drafters) {
    if (!goes(one)) kept.push_back(one);
  }
  drafters = std::move(kept);
}

inline void learn_pace(Model& model, State& next, const PackedStep& step) {
  if (step.forward_s <= 0.0 || step.num_sequences == 0 || step.prompt_rows != 0) return;
  const Model::Curve& curve = model.curve(step.num_sequences, step.num_rows);
  const Model::Entry& entry = curve[step.num_rows - step.num_sequences];
  const double beyond = step.context - model.context;
  const double more_s = beyond * (step.num_rows * model.row_key_s + step.num_sequences * model.sequence_key_s);
  const double told_s = std::max(entry.seconds + more_s, kLeastShare * entry.seconds);
  if (told_s <= 0.0) return;
  double off = over(step.forward_s, told_s * next.pace * next.regions[entry.region]);
  off = std::min(std::max(off, 0.5), 2.0) - 1.0;
  next.pace = std::min(std::max(next.pace * (1.0 + 0.1 * off), 0.02), 50.0);
  double& factor = next.regions[entry.region];
  factor = std::min(std::max(factor * (1.0 + 0.03 * off), 0.6), 1.7);
}

// Changes `next`, which is a copy of the state before; `step_drafters` are the names of the step.
inline void learn(Model& model, State& next, const PackedStep& step, const std::vector<RowFact>& rows, std::vector<Named>& step_drafters) {
  bool anybody = false;
  for (const RowFact& row : rows) {
    if (row.drafter < 0) continue;
    Named& named = step_drafters[row.drafter];
    if (!named.after) take(next, named);
    Track ended;
    Track* track = &ended;
    Tracks::Entry* known = next.tracks.find(row.id);
    if (known != nullptr) {
      track = &known->track;
      known->gone = row.finished;
    } else {
      ended.drafter = named.name;
      if (!row.finished) {
        if (row.has_prior) ended.prior = std::make_shared<const OwnPrior>(row.given);
        track = &next.tracks.add(row.id, std::move(ended));
      }
    }
    DrafterTrack& drafter = named.after->track;
    const View& view = named.before->view();
    if (row.asked > 0) {
      anybody = true;
      named.deepest = std::max<int64_t>(named.deepest, row.asked);
      waited_for(*track, drafter, view, row.asked, row.proposed, row.drafted, row.agreed, row.own_prior());
    }
    if (row.has_look) looked_at(*track, drafter, view, row.look(), std::min<int64_t>(row.k_max, kDepths), row.own_prior());
  }
  next.tracks.settle();
  forget_unused(next, step_drafters);
  const double quiet_gap_s = next.quiet_gap_s;
  if (step.gap_s >= 0.0) {
    for (Named& named : step_drafters) {
      if (!named.after) continue;
      if (named.deepest > 0) {
        timed(named.after->track, std::max(step.gap_s - quiet_gap_s, 0.0), step.draft_s, named.deepest);
      } else {
        unasked(named.after->track);
      }
    }
    if (!anybody) next.quiet_gap_s += 0.1 * (std::min(step.gap_s, 3.0 * quiet_gap_s + 1e-4) - quiet_gap_s);
  }
  learn_pace(model, next, step);
  const int64_t logits = step.num_rows - step.prompt_rows;
  if (logits > 0) {
    const double limit = 3.0 * next.accept_row_s + 2e-5;
    next.accept_row_s += 0.1 * (std::min(step.accept_s / logits, limit) - next.accept_row_s);
  }
  next.context = next.context + 0.2 * (step.context - next.context);
  next.rate = 0.0;
}

}  // namespace
