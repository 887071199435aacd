#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "numbers.h"
#include "replay.h"
#include "threads.h"

// What processes that share memory say to each other: each in turn copies a piece to its place there, and reads those of
// all others when all have come. A rank has two places: who writes to one of them knows that all have read what was there
// before, since they have come to the piece between.
namespace kvern {
namespace {

constexpr int64_t PIECE = 256 << 10;  // bytes, which stay in a core's cache
constexpr int64_t NUMBERS_OF_JOB = 16384;
constexpr auto SPIN = std::chrono::microseconds(100), YIELD = std::chrono::microseconds(2000);
constexpr auto NAP = std::chrono::microseconds(200);

enum Loss : int64_t { LATE = 0, ENDED = 1, OTHER = 2 };

// In shared memory, one for each rank, before all places.
struct alignas(128) Post {
    std::atomic<int64_t> pieces;  // so many it has brought
    std::atomic<int64_t> bytes[2];  // of all that the last two of them belong to
    std::atomic<int32_t> process, core;
};
static_assert(std::atomic<int64_t>::is_always_lock_free, "processes share them");

// As `kvern.cpu.ranks` has it. `lost`: 1 and the rank that was missing, from when on nothing is computed; `loss`: how.
struct Ranks {
    char* memory;
    int64_t rank, size, pieces, nanoseconds, lost, loss;

    Post& post(int64_t of) const { return reinterpret_cast<Post*>(memory)[of]; }
    char* place(int64_t of) const { return memory + size * sizeof(Post) + (2 * of + (pieces & 1)) * PIECE; }
};

// Wait until a rank has brought as many pieces as this one; whether it has.
bool comes(Ranks& ranks, int64_t other) {
    Post& post = ranks.post(other);
    const auto has_come = [&] { return post.pieces.load(std::memory_order_acquire) >= ranks.pieces; };
    // Where two of them have one core, who spun there would keep the other from it.
    const bool is_apart = core() < 0 || core() != post.core.load(std::memory_order_relaxed);
    const auto begun = std::chrono::steady_clock::now();
    const auto limit = std::chrono::nanoseconds(ranks.nanoseconds);
    while (!has_come()) {
        const auto waited = std::chrono::steady_clock::now() - begun;
        if (is_apart && waited < SPIN) {
            for (int spins = 0; spins < 64 && !has_come(); ++spins) pause();
        } else if (waited < YIELD) {
            sched_yield();
        } else {
            const int32_t process = post.process.load();
            const bool has_ended = process != 0 && kill(process, 0) != 0 && errno == ESRCH;
            if (has_come()) break;
            if (has_ended || waited > limit) {
                ranks.lost = other + 1, ranks.loss = has_ended ? ENDED : LATE;
                return false;
            }
            std::this_thread::sleep_for(NAP);
        }
    }
    return true;
}

// visit(begin, count) for each piece of `bytes` bytes when it is there of all ranks. Nothing once a rank is lost.
template <class Visit>
void exchange(Ranks& ranks, const void* own, int64_t bytes, const Visit& visit) {
    for (int64_t begin = 0; begin < bytes && ranks.lost == 0; begin += PIECE) {
        const int64_t count = std::min(PIECE, bytes - begin);
        Post& post = ranks.post(ranks.rank);
        const int64_t turn = ++ranks.pieces & 1;
        std::memcpy(ranks.place(ranks.rank), static_cast<const char*>(own) + begin, static_cast<size_t>(count));
        post.process.store(getpid(), std::memory_order_relaxed);
        post.core.store(core(), std::memory_order_relaxed);
        post.bytes[turn].store(bytes, std::memory_order_relaxed);
        post.pieces.store(ranks.pieces, std::memory_order_release);
        for (int64_t other = 0; other < ranks.size; ++other) {
            if (!comes(ranks, other)) return;
            if (ranks.post(other).bytes[turn].load(std::memory_order_relaxed) != bytes) {
                ranks.lost = other + 1, ranks.loss = OTHER;
                return;
            }
        }
        visit(begin, count);
    }
}

template <class Number>
void add_up(Ranks& ranks, void* x, int64_t count) {
    constexpr int64_t WIDTH = sizeof(Number);
    exchange(ranks, x, count * WIDTH, [&](int64_t begin, int64_t bytes) {
        Number* out = static_cast<Number*>(x) + begin / WIDTH;
        const int64_t numbers = bytes / WIDTH;
        parallel((numbers + NUMBERS_OF_JOB - 1) / NUMBERS_OF_JOB, [&](int64_t job) {
            const int64_t first = job * NUMBERS_OF_JOB;
            for_each_vector(std::min(numbers - first, NUMBERS_OF_JOB), [&](int64_t place, auto lanes) {
                const int64_t at = first + place;
                Floats sum = load_some(reinterpret_cast<const Number*>(ranks.place(0)) + at, lanes);
                for (int64_t rank = 1; rank < ranks.size; ++rank) {
                    sum += load_some(reinterpret_cast<const Number*>(ranks.place(rank)) + at, lanes);
                }
                store_some(out + at, sum, lanes);
            });
        });
    });
}

// Bytes from `begin` on of rows of `width` bytes go to rows of `all` bytes, from `column` on; what is beyond is left out.
void put(const char* from, int64_t begin, int64_t count, int64_t width, char* rows, int64_t column, int64_t all) {
    while (count > 0) {
        const int64_t row = begin / width, within = begin % width, some = std::min(count, width - within);
        const int64_t kept = std::min(some, all - column - within);
        if (kept > 0) std::memcpy(rows + row * all + column + within, from, static_cast<size_t>(kept));
        from += some, begin += some, count -= some;
    }
}

}  // namespace
}  // namespace kvern

// The bytes that `size` ranks share.
KVERN_EXPORT void kvern_ranks_bytes(int64_t* bytes, int64_t size) {
    using namespace kvern;
    *bytes = size * (static_cast<int64_t>(sizeof(Post)) + 2 * PIECE);
}

// x[i] = the sum of all ranks' x[i], in their order.
KVERN_EXPORT void kvern_ranks_sum(void* ranks, void* x, int64_t count, int32_t dtype) {
    using namespace kvern;
    (dtype == FLOAT32 ? add_up<float> : add_up<BFloat16>)(*static_cast<Ranks*>(ranks), x, count);
}

// out [rows, all] = the rows of `width` bytes of all ranks side by side, without what is beyond `all` bytes.
KVERN_EXPORT void kvern_ranks_beside(void* ranks, const void* x, void* out, int64_t rows, int64_t width, int64_t all) {
    kvern::Ranks& group = *static_cast<kvern::Ranks*>(ranks);
    kvern::exchange(group, x, rows * width, [&](int64_t begin, int64_t count) {
        for (int64_t rank = 0; rank < group.size; ++rank) {
            kvern::put(group.place(rank), begin, count, width, static_cast<char*>(out), rank * width, all);
        }
    });
}

// x = the first rank's.
KVERN_EXPORT void kvern_ranks_first(void* ranks, void* x, int64_t bytes) {
    kvern::Ranks& group = *static_cast<kvern::Ranks*>(ranks);
    kvern::exchange(group, x, bytes, [&](int64_t begin, int64_t count) {
        std::memcpy(static_cast<char*>(x) + begin, group.place(0), static_cast<size_t>(count));
    });
}

KVERN_REPLAYED(kvern_ranks_sum)
KVERN_REPLAYED(kvern_ranks_beside)
