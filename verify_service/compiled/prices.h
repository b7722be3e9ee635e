// What a step takes now: step_costs.py and prices.py.
#pragma once
#include <unordered_map>

#include "facts.h"

namespace {

constexpr double kLeastShare = 0.25;

class Model {
 public:
  struct Point {
    int64_t rows;
    double seconds;
  };
  struct Measured {
    int64_t count;
    std::vector<Point> points;
  };
  struct Entry {
    double seconds;
    int region;
  };
  using Curve = std::vector<Entry>;

  std::vector<Measured> measured;  // not empty, nor is any of them
  double context, row_key_s, sequence_key_s;

  // Table times of `sequences` with 0, 1, ... further rows, up to `rows` in all and one more at least.
  const Curve& curve(int64_t sequences, int64_t rows) {
    expect(within(sequences, 1, kMost) && within(rows - sequences, 0, 4 * kMost));
    Curve& curve = curves_[sequences];
    for (int64_t extra = static_cast<int64_t>(curve.size()); extra < rows - sequences + 2; ++extra) {
      curve.push_back({step_s(sequences + extra, sequences), region(sequences, extra)});
    }
    return curve;
  }

 private:
  std::unordered_map<int64_t, Curve> curves_;

  static double at(const std::vector<Point>& curve, int64_t rows) {
    const Point& first = curve.front();
    if (curve.size() == 1) return first.seconds * std::max(1.0, over(static_cast<double>(rows), static_cast<double>(first.rows)));
    const size_t last = curve.size() - 1;
    size_t to = 1;
    while (to < last && curve[to].rows < rows) ++to;
    const Point &left = curve[to - 1], &right = curve[to];
    const double rise = over((right.seconds - left.seconds) * static_cast<double>(rows - left.rows), static_cast<double>(right.rows - left.rows));
    return std::max(left.seconds + rise, 0.5 * first.seconds);
  }

  double step_s(int64_t rows, int64_t sequences) const {
    size_t to = 0;
    while (to < measured.size() && measured[to].count < sequences) ++to;
    const int64_t extra = rows - sequences;
    if (to == measured.size()) return at(measured.back().points, rows);
    const Measured& high = measured[to];
    if (high.count == sequences) return at(high.points, high.count + extra);
    if (to == 0) return at(high.points, std::max<int64_t>(rows, 1));
    const Measured& low = measured[to - 1];
    const double part = over(static_cast<double>(sequences - low.count), static_cast<double>(high.count - low.count));
    return (1.0 - part) * at(low.points, low.count + extra) + part * at(high.points, high.count + extra);
  }

  static int region(int64_t sequences, int64_t extra) {
    int count = 0, depth = 0;
    while (count < 4 && sequences > kCountEdges[count]) ++count;
    const double each = static_cast<double>(extra) / static_cast<double>(sequences);
    while (depth < 5 && each > kExtraEdges[depth]) ++depth;
    return count * 6 + depth;
  }
};

// What a step of so many sequences takes now, by further rows.
class Prices {
 public:
  Prices(Model& model, const State& state, int64_t sequences, int64_t rows)
      : curve_(model.curve(sequences, rows)), state_(state), sequences_(sequences) {
    const double beyond = state.context - model.context;
    first_s_ = beyond * sequences * (model.row_key_s + model.sequence_key_s);
    each_s_ = beyond * model.row_key_s;
  }

  double step_s(int64_t extra) const {
    expect(within(extra, 0, static_cast<int64_t>(curve_.size()) - 1));
    const Model::Entry& entry = curve_[extra];
    double table_s = entry.seconds + first_s_ + extra * each_s_;
    const double least_s = kLeastShare * entry.seconds;
    if (table_s < least_s) table_s = least_s;
    return table_s * state_.pace * state_.regions[entry.region] + (sequences_ + extra) * state_.accept_row_s;
  }

 private:
  const Model::Curve& curve_;
  const State& state_;
  int64_t sequences_;
  double first_s_, each_s_;
};

}  // namespace
