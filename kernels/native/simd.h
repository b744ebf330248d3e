// Vectors of floats as wide as the machine's, and the element types that memory may hold.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef std::int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef std::uint32_t BitVec __attribute__((vector_size(LANES * 4)));
typedef std::uint16_t HalfBits __attribute__((vector_size(LANES * 2)));

struct BFloat16 { std::uint16_t bits; };
struct Float16 { std::uint16_t bits; };

// x - 0 is x for every x, which compilers know: x + 0 is an addition, since -0 + 0 is 0.
inline Vec splat(float x) { return x - Vec{}; }

// a where the mask is set, else b; the mask is the result of a comparison of vectors.
inline Vec select(IntVec mask, Vec a, Vec b) { return mask ? a : b; }

inline Vec vmax(Vec a, Vec b) { return a > b ? a : b; }

inline float sum(Vec x) {
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += x[i];
    return total;
}

#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
typedef float Quad __attribute__((vector_size(16)));

// Four partial sums of a vector's lanes.
inline Quad fold(Vec x) {
    Quad parts[LANES / 4];
    std::memcpy(parts, &x, sizeof parts);
    for (int width = LANES / 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
    return parts[0];
}

// Stores the sums of four vectors next to each other.
inline void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
    const Quad fa = fold(a), fb = fold(b), fc = fold(c), fd = fold(d);
    const Quad ab = __builtin_shufflevector(fa, fb, 0, 4, 1, 5) +
                    __builtin_shufflevector(fa, fb, 2, 6, 3, 7);
    const Quad cd = __builtin_shufflevector(fc, fd, 0, 4, 1, 5) +
                    __builtin_shufflevector(fc, fd, 2, 6, 3, 7);
    const Quad sums = __builtin_shufflevector(ab, cd, 0, 1, 4, 5) +
                      __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    std::memcpy(p, &sums, sizeof sums);
}
#else
inline void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
    p[0] = sum(a), p[1] = sum(b), p[2] = sum(c), p[3] = sum(d);
}
#endif

// Unaligned loads and stores of LANES elements, widened to float32 and rounded to nearest even.
// GCC 12 converts vectors of _Float16 lane by lane, hence the instructions by name.
inline Vec load(const float* p) {
    Vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }

inline Vec load(const BFloat16* p) {
    HalfBits bits;
    std::memcpy(&bits, p, sizeof bits);
    return (Vec)(__builtin_convertvector(bits, BitVec) << 16);
}
inline void store(BFloat16* p, Vec x) {
    BitVec bits = (BitVec)x;
    BitVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    BitVec quiet_nan = BitVec{} + 0x7fc0;
    HalfBits half = __builtin_convertvector(x == x ? rounded : quiet_nan, HalfBits);
    std::memcpy(p, &half, sizeof half);
}

#if defined(__AVX512F__)
inline Vec load(const Float16* p) {
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store(Float16* p, Vec x) {
    const __m256i half = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}
#elif defined(__AVX__) && defined(__F16C__)
inline Vec load(const Float16* p) {
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store(Float16* p, Vec x) {
    const __m128i half = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
}
#elif defined(__FLT16_MANT_DIG__)
typedef _Float16 HalfVec __attribute__((vector_size(LANES * 2)));
inline Vec load(const Float16* p) {
    HalfVec x;
    std::memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, Vec);
}
inline void store(Float16* p, Vec x) {
    HalfVec half = __builtin_convertvector(x, HalfVec);
    std::memcpy(p, &half, sizeof half);
}
#else
// Compilers without the type. A half's exponent and fraction, read as those of a float, are 2^112
// times too small; infinity and NaN (above 65504) need the float's own exponent.
inline Vec load(const Float16* p) {
    HalfBits half;
    std::memcpy(&half, p, sizeof half);
    const BitVec bits = __builtin_convertvector(half, BitVec);
    const BitVec magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
    const Vec scaled = (Vec)magnitude * 0x1p112f;
    const BitVec special = (BitVec)(scaled > splat(65504.0f)) & 0x7f800000u;
    return (Vec)((BitVec)scaled | special | sign);
}
inline void store(Float16* p, Vec x) {
    const BitVec bits = (BitVec)x, sign = bits & 0x80000000u, magnitude = bits ^ sign;
    const Vec size = (Vec)magnitude;
    const BitVec normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
    const BitVec subnormal = (BitVec)(size + 0.5f) & 0x7ff;  // 0.5 rounds to units of 2^-24
    BitVec half = size < splat(0x1p-14f) ? subnormal : normal;
    half = size >= splat(65520.0f) ? BitVec{} + 0x7c00 : half;
    half = size == size ? half : BitVec{} + 0x7e00;
    const HalfBits stored = __builtin_convertvector(half | (sign >> 16), HalfBits);
    std::memcpy(p, &stored, sizeof stored);
}
#endif

// The first `count` < LANES elements; the other lanes are zero, and their memory is not touched.
template <class T> inline Vec load_part(const T* p, int count) {
    T buffer[LANES] = {};
    std::memcpy(buffer, p, count * sizeof(T));
    return load(buffer);
}
template <class T> inline void store_part(T* p, Vec x, int count) {
    T buffer[LANES];
    store(buffer, x);
    std::memcpy(p, buffer, count * sizeof(T));
}

// e^x with a relative error below 1e-7. Zero below -87, where float32 becomes subnormal; infinity
// above 88.3, a little early.
inline Vec exp(Vec x) {
    constexpr float LOG2_E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    Vec clamped = x < splat(-87.0f) ? splat(-87.0f) : x;
    clamped = clamped > splat(88.3f) ? splat(88.3f) : clamped;
    Vec shifted = clamped * LOG2_E + ROUND;
    Vec whole = shifted - ROUND;
    Vec r = clamped - whole * LN2_HIGH - whole * LN2_LOW;
    // Cephes' expf: minimax on [-ln 2 / 2, ln 2 / 2].
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    // The low bits of `shifted` are the whole number: move it into the exponent.
    BitVec power = ((BitVec)shifted << 23) + 0x3f800000u;
    const Vec result = x > splat(88.3f) ? splat(__builtin_inff()) : p * (Vec)power;
    return x < splat(-87.0f) ? Vec{} : result;
}

// Calls body(T{}) with the element type of a dtype code (`DTYPE_CODES` in library.py).
template <class Body> inline void with_dtype(std::int32_t code, const Body& body) {
    switch (code) {
        case 0: body(float{}); break;
        case 1: body(BFloat16{}); break;
        case 2: body(Float16{}); break;
    }
}
