// Jobs for the threads of this library: claimed one by one, so that a thread which the system has taken its core from
// holds up no more than its own job.
#pragma once

#include <cstdint>

// A function that Python calls. All else stays within a library, whatever others are loaded.
#define KVERN_EXPORT extern "C" __attribute__((visibility("default")))

namespace kvern {

// Let the core do other things for a moment, between two looks at what another one writes.
void pause();

// The core that this thread runs on; -1 where the system does not say.
int core();

using Job = void (*)(const void* body, int64_t index);

// Threads that take part, the caller's among them.
int thread_count();

// Run job(body, 0) to job(body, jobs - 1), in any order, and return when all are done. The threads sleep after a while
// without jobs. Where they are busy with another caller's jobs, the caller does its own alone.
void run_jobs(int64_t jobs, Job job, const void* body);

template <class Body>
void parallel(int64_t jobs, const Body& body) {
    if (jobs <= 1 || thread_count() == 1) {
        for (int64_t index = 0; index < jobs; ++index) body(index);
        return;
    }
    run_jobs(jobs, [](const void* given, int64_t index) { (*static_cast<const Body*>(given))(index); }, &body);
}

// body(index) for each of `count`, so many of them a job.
template <class Body>
void parallel_for_each(int64_t count, int64_t of_job, const Body& body) {
    parallel((count + of_job - 1) / of_job, [&](int64_t job) {
        for (int64_t index = job * of_job; index < count && index < (job + 1) * of_job; ++index) body(index);
    });
}

}  // namespace kvern
