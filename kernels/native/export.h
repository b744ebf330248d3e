// Functions that Python calls: C names, and a signature that the caller's is checked against.
#pragma once
#include <cstdint>

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

// Defines `name_signature()`, which gives one letter for each argument of `name`.
#define INFERQ_EXPORT(name) \
    extern "C" const char* name##_signature() { return signature_of(&name); }
