// A state as numbers and text, one after the other, so that Python can go on with it, and back. native.py has the other end.
#pragma once
#include "facts.h"

namespace {

class Writer {
 public:
  std::vector<double> reals;
  std::vector<int64_t> numbers;
  std::string text;

  explicit Writer(const State& state) {
    write(state.pace, state.accept_row_s, state.quiet_gap_s, state.context, state.rate, state.found_gain);
    write_all(state.regions);
    count(static_cast<int64_t>(state.drafters.size()), static_cast<int64_t>(state.tracks.entries.size()));
    for (const auto& drafter : state.drafters) write(*drafter);
    for (const auto& entry : state.tracks.entries) write(entry);
  }

 private:
  template <class... Values>
  void write(double value, Values... more) {
    reals.push_back(value);
    (reals.push_back(more), ...);
  }
  template <class... Values>
  void count(Values... values) {
    (numbers.push_back(values), ...);
  }
  template <size_t n>
  void write_all(const double (&values)[n]) {
    reals.insert(reals.end(), values, values + n);
  }
  void write(const std::string& name) {
    count(static_cast<int64_t>(name.size()));
    text += name;
  }
  void write(const Drafter& drafter) {
    const DrafterTrack& one = drafter.track;
    write(*drafter.name);
    write(one.accepted, one.rejected, one.filled, one.empty);
    write_all(one.seen);
    write_all(one.right);
    write_all(one.told);
    write_all(one.moods);
    write_all(one.fills);
    write_all(one.reached);
    write_all(one.wanted);
    write(one.exposed_s, one.draft_s, one.k, one.weight, one.k_square, one.k_time, one.look_s, one.read_s);
  }
  void write(const Tracks::Entry& entry) {
    const Track& one = entry.track;
    count(entry.id);
    write(*one.drafter);
    write(one.accepted, one.rejected, one.filled, one.empty);
    write_all(one.moods);
    write(one.rows, one.tokens, one.worth_s, one.better, one.worse);
    count(one.mood, one.zero_rounds, one.suspended, one.on, one.since, one.next_probe, one.probe_gap, one.reason, one.judged, one.every, one.turn);
    count(one.prior ? static_cast<int64_t>(one.prior->by_position.size()) : -1);
    if (!one.prior) return;
    write(one.prior->mean, one.prior->strength);
    reals.insert(reals.end(), one.prior->by_position.begin(), one.prior->by_position.end());
  }
};

// Throws Unusual where what is read is no state.
class Reader {
 public:
  Reader(Numbers reals, const int64_t* numbers, int64_t num_numbers, const char* text, int64_t num_bytes)
      : reals_(reals), numbers_(numbers), num_numbers_(num_numbers), text_(text), num_bytes_(num_bytes) {}

  void read(State& state) {
    read(state.pace, state.accept_row_s, state.quiet_gap_s, state.context, state.rate, state.found_gain);
    read_all(state.regions);
    const int64_t num_drafters = number(0, num_numbers_), num_tracks = number(0, num_numbers_);
    for (int64_t i = 0; i < num_drafters; ++i) state.drafters.push_back(drafter());
    for (int64_t i = 0; i < num_tracks; ++i) read_track(state);
    expect(reals_.left == 0 && num_numbers_ == 0 && num_bytes_ == 0);
  }

 private:
  Numbers reals_;
  const int64_t* numbers_;
  int64_t num_numbers_;
  const char* text_;
  int64_t num_bytes_;

  template <class... Values>
  void read(Values&... values) {
    ((values = *reals_.take(1)), ...);
  }
  template <size_t n>
  void read_all(double (&values)[n]) {
    std::copy_n(reals_.take(n), n, values);
  }
  int64_t number(int64_t least, int64_t most) {
    expect(num_numbers_ > 0);
    --num_numbers_;
    const int64_t value = *numbers_++;
    expect(within(value, least, most));
    return value;
  }
  std::string name() {
    const int64_t length = number(0, num_bytes_);
    std::string found(text_, static_cast<size_t>(length));
    text_ += length;
    num_bytes_ -= length;
    return found;
  }
  std::shared_ptr<const Drafter> drafter() {
    const Name called = std::make_shared<const std::string>(name());
    DrafterTrack one;
    read(one.accepted, one.rejected, one.filled, one.empty);
    read_all(one.seen);
    read_all(one.right);
    read_all(one.told);
    read_all(one.moods);
    read_all(one.fills);
    read_all(one.reached);
    read_all(one.wanted);
    read(one.exposed_s, one.draft_s, one.k, one.weight, one.k_square, one.k_time, one.look_s, one.read_s);
    return std::make_shared<const Drafter>(called, one);
  }
  void read_track(State& state) {
    constexpr int64_t far = int64_t{1} << 40;  // of rounds: sums of such stay numbers
    const int64_t id = number(INT64_MIN, INT64_MAX);
    expect(state.tracks.find(id) == nullptr);
    Track one;
    const Name called = std::make_shared<const std::string>(name());
    one.drafter = state.drafter(called).name;
    read(one.accepted, one.rejected, one.filled, one.empty);
    read_all(one.moods);
    read(one.rows, one.tokens, one.worth_s, one.better, one.worse);
    one.mood = number(kNothing, kAll);
    one.zero_rounds = number(0, far);
    one.suspended = number(0, 1);
    one.on = number(0, 1);
    one.since = number(0, far);
    one.next_probe = number(-far, far);
    one.probe_gap = number(-far, far);
    one.reason = static_cast<Reason>(number(0, kReasons - 1));
    one.judged = number(0, far);
    one.every = number(1, kMost);
    one.turn = number(0, far);
    const int64_t positions = number(-1, reals_.left);
    if (positions >= 0) {
      Prior prior;
      read(prior.mean, prior.strength);
      prior.count = positions;
      prior.by_position = reals_.take(positions);
      one.prior = std::make_shared<const OwnPrior>(prior);
    }
    state.tracks.add(id, std::move(one));
  }
};

}  // namespace
