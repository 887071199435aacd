#include "threads.h"

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvern {

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int core() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

namespace {

// Longer than Python takes between two kernels of a step, and shorter than it takes between steps.
constexpr auto SPIN = std::chrono::microseconds(60);

class Pool {
public:
    explicit Pool(int threads) {
        for (int index = 1; index < threads; ++index) workers_.emplace_back([this] { work(); });
    }

    ~Pool() {
        ends_ = true;
        offer();
        for (std::thread& worker : workers_) worker.join();
    }

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    void run(int64_t jobs, Job job, const void* body) {
        std::unique_lock<std::mutex> own(busy_, std::try_to_lock);
        if (!own) {
            for (int64_t index = 0; index < jobs; ++index) job(body, index);
            return;
        }
        jobs_ = jobs, job_ = job, body_ = body;
        next_.store(0, std::memory_order_relaxed);
        core_.store(core(), std::memory_order_relaxed);
        open_.store(true);
        offer();
        claim();
        open_.store(false);
        // Only those that are at a job are waited for: who sleeps, or has no core, is not.
        for (int spins = 0; inside_.load() != 0; ++spins) {
            if (spins < 4096) {
                pause();
            } else {
                std::this_thread::yield();
            }
        }
    }

private:
    void offer() {
        epoch_.fetch_add(1);
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
    }

    void claim() {
        for (int64_t index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < jobs_;) job_(body_, index);
    }

    void work() {
        uint64_t seen = 0;
        while (!ends_) {
            wait(seen);
            seen = epoch_.load();
            // Counted before it looks whether there are jobs, as `run` closes before it counts: one of both sees the other.
            inside_.fetch_add(1);
            if (open_.load()) claim();
            inside_.fetch_sub(1);
        }
    }

    void wait(uint64_t seen) {
        // Where other processes are busy, the system puts threads of one process on one core: who spun there would keep
        // the caller from it, which a quarter of the time went with.
        const int here = core();
        const bool is_alone = here < 0 || here != core_.load(std::memory_order_relaxed);
        const auto until = std::chrono::steady_clock::now() + SPIN;
        while (is_alone && std::chrono::steady_clock::now() < until) {
            for (int spins = 0; spins < 64; ++spins) {
                if (epoch_.load(std::memory_order_acquire) != seen) return;
                pause();
            }
        }
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return epoch_.load() != seen; });
        sleepers_.fetch_sub(1);
    }

    std::mutex busy_;
    int64_t jobs_ = 0;
    Job job_ = nullptr;
    const void* body_ = nullptr;
    alignas(64) std::atomic<uint64_t> epoch_{0};
    std::atomic<bool> open_{false};
    std::atomic<bool> ends_{false};
    std::atomic<int> core_{-1};  // the caller's
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> inside_{0};
    std::atomic<int> sleepers_{0};
    std::mutex sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

Pool* pool = nullptr;

}  // namespace

int thread_count() { return pool == nullptr ? 1 : pool->size(); }

void run_jobs(int64_t jobs, Job job, const void* body) { pool->run(jobs, job, body); }

}  // namespace kvern

// Compute with so many threads from now on, the caller's among them. No kernel may be running.
KVERN_EXPORT void kvern_set_threads(int threads) {
    using kvern::pool;
    static const int at_fork = pthread_atfork(nullptr, nullptr, [] { pool = nullptr; });  // threads do not survive it
    static_cast<void>(at_fork);
    if (kvern::thread_count() == threads) return;
    delete pool;
    pool = threads > 1 ? new kvern::Pool(threads) : nullptr;
}
