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

// Threads worth waking for `work` units when one of them should get at least `grain`.
inline int threads_for(std::int64_t work, std::int64_t grain) {
    return static_cast<int>(
        std::clamp<std::int64_t>(work / std::max<std::int64_t>(grain, 1), 1, omp_get_max_threads()));
}

// Runs body(thread, threads) on up to `threads` threads and waits for all; it must not throw.
template <class Body> void parallel(int threads, const Body& body) {
    if (threads <= 1) {
        body(0, 1);
        return;
    }
    auto run = [](void* data) {
        (*static_cast<const Body*>(data))(omp_get_thread_num(), omp_get_num_threads());
    };
    GOMP_parallel(run, const_cast<Body*>(&body), static_cast<unsigned>(threads), 0);
}

// Runs body(first, last) on consecutive shares of [0, work), each of about `grain` units or more.
template <class Body> void parallel_range(std::int64_t work, std::int64_t grain, const Body& body) {
    parallel(threads_for(work, grain), [&](int thread, int threads) {
        body(work * thread / threads, work * (thread + 1) / threads);
    });
}
