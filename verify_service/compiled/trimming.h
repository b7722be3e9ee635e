// How much of each block is verified: trimming.py.
#pragma once
#include "allocation.h"

namespace {

struct Ready : PackedReady {
  const double* chances = nullptr;  // `survival` of them
};

// In the order in which Python puts them into its dict.
inline int64_t trim(Model& model, const State& state, const std::vector<Ready>& ready, int64_t num_sequences, int64_t prompt_rows,
                    int64_t num_plain, PackedKept* kept) {
  int64_t count = 0, fixed_rows = 0;
  std::vector<Entry> entries;
  std::vector<bool> settled(ready.size(), false);
  for (size_t index = 0; index < ready.size(); ++index) {
    const Ready& block = ready[index];
    const Tracks::Entry* known = state.tracks.find(block.id);
    if (block.fixed || known == nullptr) {
      fixed_rows += block.length;
      settled[index] = true;
      kept[count++] = {block.id, block.length, -1};
      continue;
    }
    double reckoned[kMaxK];
    const double* survival = block.chances;
    int known_length = block.survival;
    if (known_length < 0) {
      const Track& track = known->track;
      const View& view = state.drafter(track.drafter).view();
      Prior prior;
      if (track.prior) prior = track.prior->view();
      known_length = view.survival(track, track.prior ? &prior : nullptr, block.length, kFewestWorth, reckoned);
      survival = reckoned;
    }
    for (int position = 0; position < block.length; ++position) {
      add_entry(entries, {position < known_length ? -survival[position] : 0.0, static_cast<int32_t>(index), position, 1.0});
    }
  }
  if (entries.empty()) return count;
  std::sort(entries.begin(), entries.end());
  const int64_t base_rows = prompt_rows + fixed_rows;
  const Prices prices(model, state, num_sequences, num_sequences + base_rows + static_cast<int64_t>(entries.size()) + 1);
  const double base_s = prices.step_s(base_rows);
  const double guard_s = num_plain != 0 || prompt_rows != 0 ? kTailShare * base_s : 0.0;
  const double rate = state.rate != 0.0 ? state.rate : over(static_cast<double>(num_sequences), base_s);
  double best = 0.0, gain = 0.0;
  size_t most = 0;
  bool tail = false;
  for (size_t taken = 1; taken <= entries.size(); ++taken) {
    const double step_s = prices.step_s(base_rows + static_cast<int64_t>(taken));
    if (guard_s != 0.0 && step_s > guard_s) {
      tail = true;
      break;
    }
    gain -= entries[taken - 1].negative;
    if (gain - rate * (step_s - base_s) > best) {
      best = gain - rate * (step_s - base_s);
      most = taken;
    }
  }
  std::vector<int32_t> depths(ready.size(), 0);
  for (size_t at = 0; at < most; ++at) depths[entries[at].index] = entries[at].position + 1;
  for (size_t index = 0; index < ready.size(); ++index) {
    if (settled[index]) continue;
    const Ready& block = ready[index];
    const int32_t k = depths[index];
    kept[count++] = {block.id, k, k == block.length ? -1 : tail ? kTail : kCost};
  }
  return count;
}

}  // namespace
