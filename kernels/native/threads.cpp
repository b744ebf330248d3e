// What describes the thread pool.
#include "threads.h"

#include "export.h"

// Stores the number of threads that a parallel region gets when it asks for all.
extern "C" void inferq_thread_count(std::int64_t* count) {
    *count = 0;
    parallel(omp_get_max_threads(), [&](int thread, int threads) {
        if (thread == 0) *count = threads;
    });
}
INFERQ_EXPORT(inferq_thread_count)
