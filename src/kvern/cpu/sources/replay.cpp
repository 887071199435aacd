#include "replay.h"

#include <chrono>

#include "threads.h"

// Make `calls` calls, one after another: each is the address of a kernel's `_replayed`, how many numbers it takes, and
// these.
KVERN_EXPORT void kvern_replay(const uint64_t* program, int64_t calls) {
    for (; calls > 0; --calls) {
        kvern::taken<void (*)(const uint64_t*)>(program[0])(program + 2);
        program += 2 + program[1];
    }
}

// The same `times` times, after each of which the `rows` numbers at `starts` are one higher: rows of these go on by a
// token each time.
KVERN_EXPORT void kvern_replay_repeated(
    const uint64_t* program, int64_t calls, int64_t times, int64_t* starts, int64_t rows) {
    for (int64_t time = 0; time < times; ++time) {
        kvern_replay(program, calls);
        for (int64_t row = 0; row < rows; ++row) ++starts[row];
    }
}

// Make the calls once; before the call with the number places[i], or behind the last, times[i] is the clock in nanoseconds.
KVERN_EXPORT void kvern_replay_timed(
    const uint64_t* program, int64_t calls, const int64_t* places, int64_t marks, int64_t* times) {
    int64_t mark = 0;
    for (int64_t call = 0;; ++call) {
        for (; mark < marks && places[mark] == call; ++mark) {
            const auto now = std::chrono::steady_clock::now().time_since_epoch();
            times[mark] = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
        }
        if (call == calls) return;
        kvern::taken<void (*)(const uint64_t*)>(program[0])(program + 2);
        program += 2 + program[1];
    }
}
