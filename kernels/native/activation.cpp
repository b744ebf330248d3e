// Gated activations: out [T, N] = activation(gate) * up, where each row holds gate, then up.
#include "export.h"
#include "simd.h"
#include "threads.h"

namespace {

// Elements for which waking a second thread pays.
constexpr std::int64_t GRAIN = 8192;

struct Silu {
    static Vec apply(Vec x) { return x / (exp(-x) + 1.0f); }
};

// tanh approximation: 0.5 x (1 + tanh(y)) = x / (1 + e^(-2 y)), y = sqrt(2 / pi) (x + 0.044715 x^3)
struct GeluTanh {
    static Vec apply(Vec x) {
        Vec twice = x * (x * x * 0.044715f + 1.0f) * 1.5957691216f;
        return x / (exp(-twice) + 1.0f);
    }
};

template <class Activation, class T>
void gated(const T* gate_up, T* out, std::int64_t rows, std::int64_t inner, std::int64_t stride) {
    parallel_range(rows * inner, GRAIN, [&](std::int64_t first, std::int64_t last) {
        while (first < last) {
            const std::int64_t row = first / inner, column = first % inner;
            const std::int64_t count = std::min(inner - column, last - first);
            const T* gate = gate_up + row * stride + column;
            const T* up = gate + inner;
            T* target = out + first;
            std::int64_t i = 0;
            for (; i + LANES <= count; i += LANES)
                store(target + i, Activation::apply(load(gate + i)) * load(up + i));
            if (int rest = static_cast<int>(count - i))
                store_part(target + i,
                           Activation::apply(load_part(gate + i, rest)) * load_part(up + i, rest),
                           rest);
            first += count;
        }
    });
}

}  // namespace

extern "C" void inferq_silu_and_mul(const void* gate_up, void* out, std::int64_t rows,
                                    std::int64_t inner, std::int64_t stride, std::int32_t dtype) {
    with_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        gated<Silu>(static_cast<const T*>(gate_up), static_cast<T*>(out), rows, inner, stride);
    });
}
INFERQ_EXPORT(inferq_silu_and_mul)

extern "C" void inferq_gelu_and_mul(const void* gate_up, void* out, std::int64_t rows,
                                    std::int64_t inner, std::int64_t stride, std::int32_t dtype) {
    with_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        gated<GeluTanh>(static_cast<const T*>(gate_up), static_cast<T*>(out), rows, inner, stride);
    });
}
INFERQ_EXPORT(inferq_gelu_and_mul)
