// Texts in a ring, and for each context of a few fixed lengths a chain of the places where it ended, newest first.
//
// A match finder in the manner of LZ77 compressors (hash chains over a sliding window): appending a token is a few memory
// writes, forgetting the oldest text is moving one number, and a look-up walks a bounded number of places, so none of
// the three depends on how much text there is. history.py has the same in Python, and says what a look-up gives.
//
//     ring    . | H a b c d e | . . | H a b x y | . . .        H  header of a piece: equal to no token
//                         ^end          ^end                   places where the context "a b" ended
//
// Links may lead to places that were overwritten since. Nothing is cleared: what they lead to is compared token by
// token, scope included, so a wrong link is a step in vain and never a wrong match.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <deque>

namespace {

constexpr int32_t kHeader = -1;
constexpr uint32_t kBlock = 16;  // pieces begin at multiples of it: the scope of a place is that of its block
constexpr int kMaxLevels = 4;
constexpr int kMaxFound = 256;

struct Piece {
  uint64_t start;
  uint32_t length;  // places in all: header, tokens, padding
};

struct History {
  uint32_t capacity;
  int num_levels;
  int levels[kMaxLevels];  // context lengths, rising
  int shift;               // 64 - log2 of the buckets
  int32_t* tokens;
  uint32_t* scopes;            // of each block
  uint32_t* heads[kMaxLevels];  // place + 1 of the newest, 0: none
  uint32_t* links[kMaxLevels];  // place + 1 of the one before
  uint64_t end = 0;             // places written since the beginning; place = number % capacity
  uint64_t begin = 0;           // older ones are forgotten
  uint32_t scope = 0;           // of the piece being written
  uint64_t piece_start = 0;
  std::deque<Piece> pieces;

  uint32_t place(uint64_t number) const { return static_cast<uint32_t>(number % capacity); }

  // Hash of the `length` tokens that end with *last, which are read backwards from a ring or an array.
  template <typename Before>
  uint64_t bucket(int length, uint32_t of_scope, Before before) const {
    uint64_t hash = 0x9E3779B97F4A7C15ull * (of_scope + 1) + length;
    for (int i = 0; i < length; ++i) {
      hash = (hash ^ static_cast<uint32_t>(before(i))) * 0xD6E8FEB86659FD93ull;
      hash ^= hash >> 32;
    }
    return (hash * 0x9E3779B97F4A7C15ull) >> shift;
  }
};

uint32_t* zeros(uint64_t count) { return static_cast<uint32_t*>(std::calloc(count, sizeof(uint32_t))); }

}  // namespace

extern "C" {

void history_free(void* handle) {
  auto* history = static_cast<History*>(handle);
  if (history == nullptr) return;
  std::free(history->tokens);
  std::free(history->scopes);
  for (int level = 0; level < history->num_levels; ++level) {
    std::free(history->heads[level]);
    std::free(history->links[level]);
  }
  delete history;
}

// capacity: places, a multiple of 16. nullptr: no memory.
void* history_make(uint32_t capacity, int num_levels, const int* levels, int log_buckets) {
  auto* history = new History();
  history->capacity = capacity;
  history->num_levels = num_levels;
  history->shift = 64 - log_buckets;
  history->tokens = reinterpret_cast<int32_t*>(zeros(capacity));
  history->scopes = zeros(capacity / kBlock);
  bool whole = history->tokens != nullptr && history->scopes != nullptr;
  for (int level = 0; level < num_levels; ++level) {
    history->levels[level] = levels[level];
    history->heads[level] = zeros(1ull << log_buckets);
    history->links[level] = zeros(capacity);
    whole = whole && history->heads[level] != nullptr && history->links[level] != nullptr;
  }
  if (!whole) {
    history_free(history);
    return nullptr;
  }
  return history;
}

// Begins a piece of at most `length` tokens, for which the oldest pieces make room; how many of them were forgotten.
int history_begin(void* handle, uint32_t length, uint32_t scope) {
  auto& history = *static_cast<History*>(handle);
  const uint32_t needed = (length + 1 + kBlock - 1) / kBlock * kBlock;
  int forgotten = 0;
  history.end = (history.end + kBlock - 1) / kBlock * kBlock;  // what a piece left unused stays unused
  while (!history.pieces.empty() && history.end + needed - history.begin > history.capacity) {
    history.pieces.pop_front();
    history.begin = history.pieces.empty() ? history.end : history.pieces.front().start;
    ++forgotten;
  }
  history.scope = scope;
  history.piece_start = history.end;
  for (uint32_t at = 0; at < needed; at += kBlock)
    history.scopes[history.place(history.end + at) / kBlock] = scope;
  for (uint32_t at = 0; at < needed; ++at) history.tokens[history.place(history.end + at)] = kHeader;
  history.pieces.push_back({history.end, needed});
  history.end += 1;
  return forgotten;
}

// Appends tokens to the piece begun last; no more than it was begun for.
void history_append(void* handle, const int32_t* tokens, uint32_t count) {
  auto& history = *static_cast<History*>(handle);
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t number = history.end;
    const uint32_t place = history.place(number);
    history.tokens[place] = tokens[i];
    const uint64_t known = number - history.piece_start;  // tokens of the piece, this one included
    for (int level = 0; level < history.num_levels; ++level) {
      const int length = history.levels[level];
      if (known < static_cast<uint64_t>(length)) break;
      const uint64_t bucket = history.bucket(
          length, history.scope, [&](int back) { return history.tokens[history.place(number - back)]; });
      history.links[level][place] = history.heads[level][bucket];
      history.heads[level][bucket] = place + 1;
    }
    history.end = number + 1;
  }
}

uint64_t history_places(void* handle) {
  const auto& history = *static_cast<History*>(handle);
  return history.end - history.begin;
}

// What followed the longest suffix of `context` (its `context_length` last tokens) in pieces of `scope`.
//
// A place counts if the tokens before it equal at least the shortest level's number of last context tokens. Of the
// newest `max_found` places on the longest level that has one, those with the longest match vote token by token; the
// majority (at a tie the newest place's) is the guess, and who voted otherwise leaves. `own`: the context is the end of
// the only piece, so its last place is no match, and a match that runs into the end goes on with the guesses.
// Gives the number of guesses; `votes` and `agreed` [k] how many voted and for the guess, `match` the match's length.
int history_guess(void* handle, const int32_t* context, int context_length, uint32_t scope, int own, int max_found,
                  int max_steps, int k, int32_t* guesses, int32_t* votes, int32_t* agreed, int32_t* match) {
  const auto& history = *static_cast<History*>(handle);
  const uint64_t live = history.end - history.begin;
  const int32_t* last = context + context_length - 1;
  uint64_t found[kMaxFound];
  int num_found = 0, longest = 0;
  max_found = std::min(max_found, kMaxFound);
  for (int level = history.num_levels - 1; level >= 0 && num_found == 0; --level) {
    const int length = history.levels[level];
    if (length > context_length) continue;
    const uint64_t bucket = history.bucket(length, scope, [&](int back) { return last[-back]; });
    uint32_t link = history.heads[level][bucket];
    uint64_t age = 0;  // of the place looked at last: ages must grow, or the links run in a circle
    int seen = 0;
    for (int step = 0; link != 0 && step < max_steps && seen < max_found; ++step) {
      const uint32_t place = link - 1;
      const uint64_t newest = history.place(history.end);  // one behind the newest place
      const uint64_t back = (newest + history.capacity - place - 1) % history.capacity + 1;
      if (back <= age || back > live) break;
      age = back;
      link = history.links[level][place];
      const uint64_t number = history.end - back;
      if (own && back == 1) continue;
      if (history.scopes[place / kBlock] != scope) continue;
      int same = 0;
      while (same < context_length && history.tokens[history.place(number - same)] == last[-same]) ++same;
      if (same < length) continue;
      ++seen;
      if (same > longest) {
        longest = same;
        num_found = 0;
      }
      if (same == longest) found[num_found++] = number;
    }
  }
  *match = longest;
  int made = 0;
  while (made < k && num_found > 0) {
    int32_t nexts[kMaxFound];
    int voters = 0;
    for (int i = 0; i < num_found; ++i) {
      const uint64_t number = found[i] + 1 + made;
      int32_t next = kHeader;
      if (number < history.end) next = history.tokens[history.place(number)];
      else if (own) next = guesses[number - history.end];
      if (next == kHeader) continue;
      found[voters] = found[i];
      nexts[voters++] = next;
    }
    if (voters == 0) break;
    int best = 0, most = 0;
    for (int i = 0; i < voters && voters - i > most; ++i) {
      int count = 0;
      for (int j = i; j < voters; ++j) count += nexts[j] == nexts[i];
      if (count > most) {
        most = count;
        best = i;
      }
    }
    guesses[made] = nexts[best];
    votes[made] = voters;
    agreed[made] = most;
    const int32_t chosen = nexts[best];
    num_found = 0;
    for (int i = 0; i < voters; ++i)
      if (nexts[i] == chosen) found[num_found++] = found[i];
    ++made;
  }
  return made;
}

}  // extern "C"
