// OpenMP waits in one way for a process's whole life. On quiet cores, where a step has some 200 parallel regions of a fifth of a
// millisecond, threads that spin are a third faster. Beside one busy process they are thirty times slower, since they use up the
// time slices of the thread that they wait for. So a team spins, and sleeps for a while once other processes need its cores.
#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <memory>
#include <thread>
#include <vector>

#include "simd.h"

namespace starling {
namespace {

constexpr int64_t kMillisecond = 1000 * 1000;
// A longer wait ends in sleep. Waits between two kernels of a step are far shorter, and so are most waits between two steps.
constexpr int64_t kSpin = 2 * kMillisecond;
// Other processes need the cores when they had more than a quarter of a window in which this thread worked or spun, and took them
// several times. The server that shares an engine's cores has less. Time that a virtual machine's host takes is lost, too, but
// nothing here would use it: then the kernel switches to other threads 3 times in a window at most, and else 10 to 300 times.
constexpr int64_t kWindow = 50 * kMillisecond;
constexpr int64_t kMostLost = 4;
constexpr int64_t kFewSwitches = 6;
// Threads then sleep instead of spinning for this long. Their losses are not seen meanwhile, so afterwards they try to spin again.
constexpr int64_t kCrowded = 500 * kMillisecond;
constexpr int64_t kLook = kMillisecond / 2;
constexpr int64_t kGap = kMillisecond / 20;

int64_t read_clock(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * 1000 * kMillisecond + time.tv_nsec;
}

int64_t now() { return read_clock(CLOCK_MONOTONIC); }

std::atomic<int64_t> crowded_until{0};
std::atomic<uint32_t> forks{0};  // of this process's ancestors; a team's threads stay with the parent

// Measures how much of its time a thread lost its core while it wanted it.
//
// The clock of a thread's own time is a system call, as long as a small kernel. So it is read at most once in kLook: kernels with no
// more than kGap between them count as one time in which the core was wanted.
class Losses {
 public:
  // Begins a time in which the core is wanted, or goes on with the last one.
  void begin() {
    if (now() - until_ < kGap) return;
    if (until_ != wall_) end(until_);
    wall_ = now(), cpu_ = read_clock(CLOCK_THREAD_CPUTIME_ID);
  }

  // Ends it where it has been long enough. What is wanted next may follow without `begin`.
  void lap() {
    until_ = now();
    if (until_ - wall_ >= kLook) end(until_);
  }

  // Ends it: the thread sleeps, and however soon it wakes, that time is not lost.
  void pause() {
    end(now());
    wall_ = until_ = 0;
  }

 private:
  // Counts the time until `wall`.
  void end(int64_t wall) {
    const int64_t cpu = read_clock(CLOCK_THREAD_CPUTIME_ID);
    wanted_ += wall - wall_;
    lost_ += std::max<int64_t>(0, wall - wall_ - (cpu - cpu_));
    wall_ = until_ = wall, cpu_ = cpu;
    if (wanted_ < kWindow) return;
    rusage used;
    getrusage(RUSAGE_THREAD, &used);
    const bool switched = used.ru_nivcsw - switches_ > kFewSwitches;
    if (switched && lost_ > wanted_ / kMostLost) crowded_until.store(now() + kCrowded, std::memory_order_relaxed);
    wanted_ = lost_ = 0, switches_ = used.ru_nivcsw;
  }

  int64_t wall_ = 0, until_ = 0, cpu_ = 0, wanted_ = 0, lost_ = 0, switches_ = 0;
};

// A number that threads wait for others to change.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  void set(uint32_t value) { value_.store(value); }
  uint32_t add(int32_t by) { return value_.fetch_add(by) + by; }

  // Called after a change that a thread may sleep for.
  void wake() {
    if (sleepers_.load() > 0) syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  // Returns once the value is no longer `old`. A sleeping thread returns at the first `wake` after that.
  void await_change(uint32_t old, Losses& losses) {
    if (spin(old)) return;
    losses.pause();
    sleepers_.fetch_add(1);
    while (value_.load() == old) syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1);
    losses.begin();
  }

 private:
  bool spin(uint32_t old) const {
    const int64_t begin = now();
    const int64_t end = begin < crowded_until.load(std::memory_order_relaxed) ? begin : begin + kSpin;
    do {
      for (int i = 0; i < 64; ++i) {
        if (value() != old) return true;
        relax();
      }
    } while (now() < end);
    return false;
  }

  alignas(64) std::atomic<uint32_t> value_{0};
  alignas(64) std::atomic<uint32_t> sleepers_{0};
};

class Team {
 public:
  ~Team() {
    if (born_ != forks.load()) {
      // The parent's threads do not run in this process, and cannot be joined.
      new std::vector<std::thread>(std::move(workers_));
      return;
    }
    call_ = nullptr;
    go_.add(1);
    go_.wake();
    for (std::thread& worker : workers_) worker.join();
  }

  static Team& mine() {
    static thread_local std::unique_ptr<Team> team;
    if (!team || team->born_ != forks.load()) team.reset(new Team);
    return *team;
  }

  void run(int threads, void (*call)(const void*, Part), const void* work) {
    while (static_cast<int>(workers_.size()) < threads - 1) start_thread();
    call_ = call, work_ = work, threads_ = threads;
    left_.set(static_cast<uint32_t>(workers_.size()));
    losses_.begin();
    go_.add(1);
    go_.wake();
    call(work, Part{0, threads});
    for (uint32_t left; (left = left_.value()) != 0;) left_.await_change(left, losses_);
    losses_.lap();
  }

 private:
  // Starts a thread that gets no signals: those are for the threads that had them before.
  void start_thread() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    workers_.emplace_back(&Team::serve, this, static_cast<int>(workers_.size()) + 1, go_.value());
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void serve(int index, uint32_t seen) {
    Losses losses;
    for (losses.begin();; ++seen) {
      while (go_.value() == seen) go_.await_change(seen, losses);
      if (call_ == nullptr) return;
      if (index < threads_) call_(work_, Part{index, threads_});
      if (left_.add(-1) == 0) left_.wake();
      losses.lap();
    }
  }

  const uint32_t born_ = forks.load();
  std::vector<std::thread> workers_;
  Losses losses_;
  void (*call_)(const void*, Part) = nullptr;
  const void* work_ = nullptr;
  int threads_ = 1;
  Signal go_, left_;
};

// Runs once for the library.
const int watching_forks = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });

}  // namespace

void run_on_team(int threads, void (*call)(const void*, Part), const void* work) { Team::mine().run(threads, call, work); }

}  // namespace starling
