// Threads that share the phases of a forward.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

struct alignas(64) Counter {
  std::atomic<int64_t> value{0};
};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Phases {
 public:
  explicit Phases(int threads) : threads_(threads) {}

  void reset(size_t count) {
    count *= threads_ + 1;
    if (count > size_) {
      counters_.reset(new Counter[count]);
      size_ = count;
    }
    for (size_t i = 0; i < count; ++i) counters_[i].value.store(0, std::memory_order_relaxed);
  }

  // Runs task(i) for i < count, shared among the threads; before the first one this thread takes, prepare(), and when there
  // is nothing left to take, finish(). Each thread has a range of its own, since neighbouring tasks read neighbouring
  // memory, and then helps in the others'. It takes a few at a time, since taking waits for all that is under way.
  template <typename Prepare, typename Task, typename Finish>
  void run(int64_t& at, int thread, int64_t count, Prepare&& prepare, Task&& task, Finish&& finish) {
    Counter* next = &counters_[at++ * (threads_ + 1)];
    std::atomic<int64_t>& done = next[threads_].value;
    const int64_t few = std::max<int64_t>(1, count / threads_ / 12);
    int64_t taken = 0;
    for (int turn = 0; turn < threads_; ++turn) {
      const int owner = (thread + turn) % threads_;
      const int64_t begin = begin_of(owner, count), end = begin_of(owner + 1, count);
      for (;;) {
        const int64_t first = begin + next[owner].value.fetch_add(few, std::memory_order_relaxed);
        if (first >= end) break;
        if (taken == 0) prepare();
        const int64_t last = std::min(first + few, end);
        for (int64_t i = first; i < last; ++i) task(i);
        taken += last - first;
      }
    }
    if (taken != 0) done.fetch_add(taken, std::memory_order_release);
    finish();
    for (int spins = 0; done.load(std::memory_order_acquire) < count; ++spins) {
      if (spins < 4000) {
        relax();
      } else {
        sched_yield();  // the core of whoever holds the task is wanted elsewhere: do not make it worse
      }
    }
  }

  template <typename Task>
  void run(int64_t& at, int thread, int64_t count, Task&& task) {
    run(at, thread, count, [] {}, task, [] {});
  }

  // First task of a thread's range.
  int64_t begin_of(int thread, int64_t count) const { return count * thread / threads_; }

 private:
  const int threads_;
  std::unique_ptr<Counter[]> counters_;
  size_t size_ = 0;
};

// Threads that help the caller for as long as it has a job open.
class Workers {
 public:
  explicit Workers(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this, i] { live(i + 1); });
  }

  ~Workers() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int count() const { return static_cast<int>(threads_.size()); }

  void run(const std::function<void(int)>& job) {
    if (!threads_.empty()) {
      {
        std::lock_guard<std::mutex> hold(mutex_);
        job_ = &job;
        ++number_;
      }
      wake_.notify_all();
    }
    job(0);
    if (!threads_.empty()) {
      std::unique_lock<std::mutex> hold(mutex_);
      job_ = nullptr;  // who has not woken by now is not needed
      idle_.wait(hold, [this] { return active_ == 0; });
    }
  }

 private:
  void live(int index) {
    std::unique_lock<std::mutex> hold(mutex_);
    int64_t seen = 0;
    for (;;) {
      wake_.wait(hold, [&] { return ending_ || (job_ != nullptr && number_ != seen); });
      if (ending_) return;
      seen = number_;
      const auto* job = job_;
      ++active_;
      hold.unlock();
      (*job)(index);
      hold.lock();
      if (--active_ == 0) idle_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  const std::function<void(int)>* job_ = nullptr;
  int64_t number_ = 0;
  int active_ = 0;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace
