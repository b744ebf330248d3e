// Work on the threads of the OpenMP runtime that torch has loaded: one pool, torch's thread count.
//
// The runtime is called directly rather than by `#pragma omp parallel`: every compiler then makes
// the same calls, which GNU's and LLVM's runtimes both answer on Linux.
#pragma once
#include <algorithm>
#include <cstdint>

extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_max_threads();
int omp_get_num_threads();
int omp_get_thread_num();
}

// Threads that `work` units should be shared by when each is to get at least `grain`.
inline int threads_for(std::int64_t work, std::int64_t grain) {
    if (work < 2 * grain) return 1;
    return static_cast<int>(std::min<std::int64_t>(work / grain, omp_get_max_threads()));
}

// Runs body(thread, threads) on up to `threads` threads and waits for all; it must not throw.
template <class Body> void parallel(int threads, const Body& body) {
    if (threads <= 1) {
        body(0, 1);
        return;
    }
    struct Call {
        const Body& body;
        int threads;
    } call{body, threads};
    auto run = [](void* data) {
        const Call& call = *static_cast<Call*>(data);
        const int thread = omp_get_thread_num();
        const int threads = std::min(call.threads, omp_get_num_threads());
        if (thread < threads) call.body(thread, threads);
    };
    // Always the whole pool, as torch does: GNU's runtime ends the threads that a smaller team
    // leaves out, and starting them again costs more than letting them pass.
    GOMP_parallel(run, &call, 0, 0);
}

// Runs body(first, last) on consecutive shares of [0, work), each of at least `grain` units.
template <class Body> void parallel_range(std::int64_t work, std::int64_t grain, const Body& body) {
    parallel(threads_for(work, grain), [&](int thread, int threads) {
        body(work * thread / threads, work * (thread + 1) / threads);
    });
}
