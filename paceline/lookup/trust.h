// How far what was found can be trusted: trust.py in C++. The same arithmetic in the same order, so that both give the same
// to the last bit; trust.py says what it means.
#pragma once

#include <algorithm>
#include <cstdint>

namespace {

constexpr int kMaxMatch = 32;
constexpr int kMaxK = 64;
constexpr double kSurest = 0.99;

struct Cell {
  double right, expected;
};

class Trust {
 public:
  Trust() {
    for (auto& of_source : cells_)
      for (auto& of_length : of_source)
        for (Cell& cell : of_length) cell = {kPrior * kPriorRight, kPrior};
  }

  Cell* of(int source, int match_length, int votes) {
    int bucket = 0, size = 0;
    for (int low : kLengths) bucket += match_length >= low;
    for (int rest = std::min(votes, 8); rest > 0; rest >>= 1) ++size;
    return &cells_[source][bucket][size];
  }

 private:
  static constexpr int kLengths[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
  static constexpr double kPrior = 8.0, kPriorRight = 0.6;
  Cell cells_[2][11][5];
};

class Luck {
 public:
  double factor() const { return std::min(right_ / expected_, kMostBetter); }

  void observe(double expected, bool right) {
    right_ += (1.0 - kKeep) * (kPrior - right_) + (right ? 1.0 : 0.0);
    expected_ += (1.0 - kKeep) * (kPrior - expected_) + expected;
  }

 private:
  static constexpr double kPrior = 4.0, kKeep = 0.97, kMostBetter = 1.3;
  double right_ = kPrior, expected_ = kPrior;
};

class Path {
 public:
  bool add(int64_t token, Cell* cell, double share, double factor, double bar) {
    const double chance = share * cell->right / cell->expected;
    const double sure = std::min(chance, kSurest);
    double probability = count_ ? probabilities_[count_ - 1] : 1.0;
    probability *= sure * factor / (1.0 - sure + sure * factor);
    if (probability < bar) return false;
    tokens_[count_] = token;
    cells_[count_] = cell;
    shares_[count_] = share;
    chances_[count_] = chance;
    probabilities_[count_++] = probability;
    worth_ += probability;
    return true;
  }

  void settle(const int32_t* fresh, int num_fresh, Luck& luck) const {
    for (int i = 0; i < count_ && i < num_fresh; ++i) {
      const bool right = tokens_[i] == fresh[i];
      cells_[i]->expected += shares_[i];
      luck.observe(std::min(chances_[i], 1.0), right);
      if (!right) break;
      cells_[i]->right += 1.0;
    }
  }

  void clear() {
    count_ = 0;
    worth_ = 0.0;
  }

  int write(int64_t* tokens, double* probabilities) const {
    std::copy_n(tokens_, count_, tokens);
    std::copy_n(probabilities_, count_, probabilities);
    return count_;
  }

  int count() const { return count_; }
  double worth() const { return worth_; }

 private:
  int count_ = 0;
  double worth_ = 0.0;
  int64_t tokens_[kMaxK];
  Cell* cells_[kMaxK];
  double shares_[kMaxK], chances_[kMaxK], probabilities_[kMaxK];
};

}  // namespace
