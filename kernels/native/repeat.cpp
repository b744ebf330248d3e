// Repeats recorded calls (`recording.py`).
#include "export.h"

namespace {

struct Call {
    void (*repeat)(const Slot*);
    const Slot* slots;
};

}  // namespace

// Makes `count` calls, each of which lies in `calls` as two addresses: its function's
// `name_repeat`, and its arguments'.
extern "C" void inferq_repeat(const void* calls, std::int64_t count) {
    const Call* call = static_cast<const Call*>(calls);
    for (std::int64_t i = 0; i < count; ++i) call[i].repeat(call[i].slots);
}
INFERQ_EXPORT(inferq_repeat)
