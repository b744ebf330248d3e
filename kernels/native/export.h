// Functions that Python calls: C names, and a signature that the caller's is checked against.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

template <class T> struct TypeCode;
template <> struct TypeCode<std::int32_t> { static constexpr char code = 'i'; };
template <> struct TypeCode<std::int64_t> { static constexpr char code = 'l'; };
template <> struct TypeCode<float> { static constexpr char code = 'f'; };
template <class T> struct TypeCode<T*> { static constexpr char code = 'p'; };

template <class... Arguments> struct Signature {
    static constexpr char text[] = {TypeCode<Arguments>::code..., '\0'};
};

template <class... Arguments> const char* signature_of(void (*)(Arguments...)) {
    return Signature<Arguments...>::text;
}

// Memory of one argument of a recorded call; the value lies at its beginning.
struct Slot {
    alignas(8) unsigned char bytes[8];

    template <class T> T as() const {
        T value;
        std::memcpy(&value, bytes, sizeof value);
        return value;
    }
};

template <class... Arguments, std::size_t... Index>
void call_with(void (*function)(Arguments...), const Slot* slots, std::index_sequence<Index...>) {
    function(slots[Index].template as<Arguments>()...);
}

template <class... Arguments>
void call_with(void (*function)(Arguments...), const Slot* slots) {
    call_with(function, slots, std::index_sequence_for<Arguments...>{});
}

// Defines `name_signature()`, which gives one letter for each argument of `name`, and
// `name_repeat(slots)`, which calls it with arguments that lie in memory.
#define INFERQ_EXPORT(name)                                                  \
    extern "C" const char* name##_signature() { return signature_of(&name); } \
    extern "C" void name##_repeat(const Slot* slots) { call_with(&name, slots); }
