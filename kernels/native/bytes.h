// Dot products of four bytes in each of LANES columns: sums[c] += Σ_j weight[4 c + j] · x[j].
//
// Exact 32-bit integers in every form, so that all machines give the same.
#pragma once
#include "simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace bytes {

// Four signed bytes of x, in memory order.
using Four = std::int32_t;

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// The instruction multiplies unsigned with signed bytes: weights are stored with 128 added, and
// the caller subtracts OFFSET · Σ x.
constexpr int OFFSET = 128;
// Rows whose integer sums, and float sums beside them, stay in the registers.
constexpr int TILE = 8;
using Bytes = __m512i;

inline Bytes load_bytes(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
inline IntVec dot_unsigned(IntVec sums, Bytes weight, Four x) {
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, weight, _mm512_set1_epi32(x));
}
inline IntVec dot(IntVec sums, Bytes weight, Four x) { return dot_unsigned(sums, weight, x); }
inline Bytes low_nibbles(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes b) { return low_nibbles(_mm512_srli_epi16(b, 4)); }

#elif defined(__AVX2__) && !defined(__AVX512F__)

constexpr int OFFSET = 0;
// Sixteen registers: the products take some beside the sums.
constexpr int TILE = 4;
using Bytes = __m256i;

inline Bytes load_bytes(const std::uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
// Weights below 128; |x| <= 127 and weights below 16 cannot saturate the 16-bit sums of pairs,
// and neither can |weight| <= 127.
inline IntVec dot_unsigned(IntVec sums, Bytes weight, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(weight, x);
    return sums + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
inline IntVec dot_unsigned(IntVec sums, Bytes weight, Four x) {
    return dot_unsigned(sums, weight, _mm256_set1_epi32(x));
}
inline IntVec dot(IntVec sums, Bytes weight, Four x) {
    const __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32(x), weight);
    return dot_unsigned(sums, _mm256_abs_epi8(weight), signed_x);
}
inline Bytes low_nibbles(Bytes b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes b) { return low_nibbles(_mm256_srli_epi16(b, 4)); }

#else

constexpr int OFFSET = 0;
constexpr int TILE = 4;
using Bytes = IntVec;

inline Bytes load_bytes(const std::uint8_t* p) {
    Bytes b;
    std::memcpy(&b, p, sizeof b);
    return b;
}
template <int J, class V> inline V nth_byte(V v) { return (v << (24 - 8 * J)) >> 24; }

inline IntVec dot(IntVec sums, Bytes weight, Four x) {
    sums += nth_byte<0>(weight) * nth_byte<0>(x);
    sums += nth_byte<1>(weight) * nth_byte<1>(x);
    sums += nth_byte<2>(weight) * nth_byte<2>(x);
    return sums + nth_byte<3>(weight) * nth_byte<3>(x);
}
inline IntVec dot_unsigned(IntVec sums, Bytes weight, Four x) { return dot(sums, weight, x); }
inline Bytes low_nibbles(Bytes b) { return b & 0x0f0f0f0f; }
inline Bytes high_nibbles(Bytes b) { return low_nibbles(b >> 4); }

#endif

}  // namespace bytes
