// The controller, compiled: what controller.py and trimming.py do at each step, in some microseconds. Python has the same, which
// says what everything means and is the truth that tests hold this to, to the last bit. A call that the headers find unusual
// changes nothing and is left to Python.
#include <cstring>
#include <new>

#include "deciding.h"
#include "passing.h"
#include "trimming.h"

namespace {

// The rows of a step with what they refer to. Throws Unusual where Python would meet with something that this has no room for.
std::vector<RowFact> rows_of(const PackedRow* packed, int64_t count, int64_t num_names, Numbers& numbers) {
  std::vector<RowFact> rows(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    RowFact& row = rows[i];
    static_cast<PackedRow&>(row) = packed[i];
    expect(within(row.drafter, -1, num_names - 1));
    expect(within(row.k_max, 0, kMaxK) && within(row.asked, 0, kMaxK) && within(row.proposed, -1, kMaxK));
    expect(within(row.drafted, 0, kMaxK) && within(row.agreed, 0, kMaxK) && within(row.found, -1, kMaxK));
    if (row.has_look) {
      expect(within(row.look_length, 0, kMaxK) && within(row.look_checked, 0, kMaxK));
      expect(within(row.look_agreed, 0, kMaxK) && row.look_read >= 0);
    }
    if (row.found > 0) row.chances = numbers.take(row.found);
    row.has_prior = row.prior >= 0;
    if (row.has_prior) {
      const double* own = numbers.take(2);
      row.given = {own[0], own[1], numbers.take(row.prior), row.prior};
    }
  }
  return rows;
}

// No row twice: Python's dicts would keep the last one.
template <class Row>
void expect_different(const Row* rows, int64_t count) {
  std::vector<int64_t> ids(static_cast<size_t>(count));
  bool ascending = true;
  for (int64_t i = 0; i < count; ++i) {
    ids[i] = rows[i].id;
    ascending &= i == 0 || ids[i - 1] < ids[i];
  }
  if (ascending) return;
  std::sort(ids.begin(), ids.end());
  expect(std::adjacent_find(ids.begin(), ids.end()) == ids.end());
}

// `names` are `num_names` lengths and the text of all.
std::vector<Named> named(const char* text, const int64_t* lengths, int64_t num_names) {
  std::vector<Named> found(static_cast<size_t>(num_names));
  for (int64_t i = 0; i < num_names; ++i) {
    found[i].name = std::make_shared<const std::string>(text, static_cast<size_t>(lengths[i]));
    text += lengths[i];
  }
  return found;
}

}  // namespace

extern "C" {

// nullptr: a table that Python has to look into. `sizes` by curve; its points one after the other.
void* model_make(const int64_t* counts, const int64_t* sizes, int64_t num_curves, const int64_t* rows, const double* seconds, double context,
                 double row_key_s, double sequence_key_s) try {
  auto model = std::make_unique<Model>();
  for (int64_t i = 0; i < num_curves; ++i) {
    Model::Measured measured{counts[i], {}};
    for (int64_t j = 0; j < sizes[i]; ++j) measured.points.push_back({*rows++, *seconds++});
    if (measured.points.empty()) return nullptr;
    model->measured.push_back(std::move(measured));
  }
  if (model->measured.empty()) return nullptr;
  model->context = context;
  model->row_key_s = row_key_s;
  model->sequence_key_s = sequence_key_s;
  return model.release();
} catch (const std::bad_alloc&) {
  return nullptr;
}

void model_free(void* model) { delete static_cast<Model*>(model); }

void state_free(void* state) { delete static_cast<State*>(state); }

// The state after the step, with a decision for each row that goes on in `decisions`, which has room for all of them; nullptr:
// Python has to do it.
void* state_decide(void* model, const void* before, PackedStep* step, const PackedRow* packed, int64_t num_rows, const char* text,
                   const int64_t* lengths, int64_t num_names, const double* numbers, int64_t num_numbers, PackedDecision* decisions) try {
  expect(within(step->num_sequences, 0, kMost) && within(step->num_rows, 0, kMost) && within(step->prompt_rows, 0, kMost));
  expect(within(step->running, 0, kMost));
  expect_different(packed, num_rows);
  Numbers left{numbers, num_numbers};
  const std::vector<RowFact> rows = rows_of(packed, num_rows, num_names, left);
  std::vector<Named> drafters = named(text, lengths, num_names);
  auto next = std::make_unique<State>(*static_cast<const State*>(before));
  learn(*static_cast<Model*>(model), *next, *step, rows, drafters);
  Decisions made{decisions};
  Deciding(*static_cast<Model*>(model), *next, drafters, made).decide(*step, rows);
  step->num_decisions = made.count;
  return next.release();
} catch (const Unusual&) {
  return nullptr;
} catch (const std::bad_alloc&) {
  return nullptr;
}

// How many are in `kept`, which has room for all; -1: Python has to do it.
int64_t state_trim(void* model, const void* state, const PackedReady* packed, int64_t num_ready, const double* numbers, int64_t num_numbers,
                   int64_t num_sequences, int64_t prompt_rows, int64_t num_plain, PackedKept* kept) try {
  expect(within(num_sequences, 0, kMost) && within(prompt_rows, 0, kMost));
  expect_different(packed, num_ready);
  Numbers left{numbers, num_numbers};
  std::vector<Ready> ready(static_cast<size_t>(num_ready));
  for (int64_t i = 0; i < num_ready; ++i) {
    static_cast<PackedReady&>(ready[i]) = packed[i];
    expect(within(packed[i].length, 0, kMaxK));
    if (packed[i].survival >= 0) ready[i].chances = left.take(packed[i].survival);
  }
  return trim(*static_cast<Model*>(model), *static_cast<const State*>(state), ready, num_sequences, prompt_rows, num_plain, kept);
} catch (const Unusual&) {
  return -1;
} catch (const std::bad_alloc&) {
  return -1;
}

// How many of `ids` are suspended or not known.
int64_t state_idle(const void* state, const int64_t* ids, int64_t count) {
  int64_t idle = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Tracks::Entry* known = static_cast<const State*>(state)->tracks.find(ids[i]);
    idle += known == nullptr || known->track.suspended;
  }
  return idle;
}

// The state without a sequence; nullptr: it is not known, or there is no memory.
void* state_without(const void* state, int64_t id) try {
  if (static_cast<const State*>(state)->tracks.find(id) == nullptr) return nullptr;
  auto next = std::make_unique<State>(*static_cast<const State*>(state));
  next->tracks.find(id)->gone = true;
  next->tracks.settle();
  return next.release();
} catch (const std::bad_alloc&) {
  return nullptr;
}

// What prices need: pace, accept_row_s, context, regions.
void state_pace(const void* handle, double* found) {
  const State& state = *static_cast<const State*>(handle);
  *found++ = state.pace;
  *found++ = state.accept_row_s;
  *found++ = state.context;
  std::copy_n(state.regions, kRegions, found);
}

// The state as numbers and text (see passing.h); how many of each there are. Written only where all are as many as `sizes` says.
int state_write(const void* state, double* reals, int64_t* numbers, char* text, int64_t* sizes) try {
  const Writer written(*static_cast<const State*>(state));
  const int64_t found[] = {static_cast<int64_t>(written.reals.size()), static_cast<int64_t>(written.numbers.size()),
                           static_cast<int64_t>(written.text.size())};
  if (std::equal(found, found + 3, sizes)) {
    std::copy(written.reals.begin(), written.reals.end(), reals);
    std::copy(written.numbers.begin(), written.numbers.end(), numbers);
    std::copy(written.text.begin(), written.text.end(), text);
    return 1;
  }
  std::copy_n(found, 3, sizes);
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

// nullptr: no state that this has room for.
void* state_read(const double* reals, int64_t num_reals, const int64_t* numbers, int64_t num_numbers, const char* text, int64_t num_bytes) try {
  auto state = std::make_unique<State>();
  Reader({reals, num_reals}, numbers, num_numbers, text, num_bytes).read(*state);
  return state.release();
} catch (const Unusual&) {
  return nullptr;
} catch (const std::bad_alloc&) {
  return nullptr;
}

}  // extern "C"
