// The vectors of a machine: Codes (32 bytes), Ints and Floats (eight numbers, one per output).
//
// A chunk is one of Codes: four codes of each of eight outputs, which `dot` multiplies by four inputs.

#pragma once

#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#include "products.h"

#if defined(REGARD_PORTABLE)  // to test the code for other machines
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define REGARD_NEON
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#include <immintrin.h>
#define REGARD_AVX2
#endif

namespace regard {
namespace {

#if defined(REGARD_NEON)

struct Codes { uint8x16_t a, b; };
struct Ints { int32x4_t a, b; };
struct Floats { float32x4_t a, b; };
struct Inputs { int8x16_t p; };  // sixteen of them

inline Codes load(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
template <int N> inline Codes shift_right(Codes v) {
  if constexpr (N == 0) return v;
  else return {vshrq_n_u8(v.a, N), vshrq_n_u8(v.b, N)};
}
template <int N> inline Codes shift_left(Codes v) { return {vshlq_n_u8(v.a, N), vshlq_n_u8(v.b, N)}; }
inline Codes mask(Codes v, uint8_t m) { return {vandq_u8(v.a, vdupq_n_u8(m)), vandq_u8(v.b, vdupq_n_u8(m))}; }
inline Codes merge(Codes v, Codes w) { return {vorrq_u8(v.a, w.a), vorrq_u8(v.b, w.b)}; }
inline Inputs load_inputs(const int8_t* p) { return {vld1q_s8(p)}; }
inline Ints broadcast(int32_t v) { return {vdupq_n_s32(v), vdupq_n_s32(v)}; }
// acc += the products of a chunk with inputs 4 LANE to 4 LANE + 3
template <int LANE, bool SIGNED> inline Ints dot(Ints acc, Codes w, Inputs x) {
  return {vdotq_laneq_s32(acc.a, vreinterpretq_s8_u8(w.a), x.p, LANE),
          vdotq_laneq_s32(acc.b, vreinterpretq_s8_u8(w.b), x.p, LANE)};
}
template <bool SIGNED> inline int32_t start(int32_t zero, int32_t sum) { return -zero * sum; }
inline Ints load_ints(const uint8_t* p) {
  int16x8_t v = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
  return {vmovl_s16(vget_low_s16(v)), vmovl_high_s16(v)};
}
inline Ints minus_product(Ints acc, Ints v, int32_t s) { return {vmlsq_n_s32(acc.a, v.a, s), vmlsq_n_s32(acc.b, v.b, s)}; }
inline Floats to_floats(Ints v) { return {vcvtq_f32_s32(v.a), vcvtq_f32_s32(v.b)}; }
inline Floats zeros() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
inline Floats load_f32(const uint8_t* p) {
  auto f = reinterpret_cast<const float*>(p);
  return {vld1q_f32(f), vld1q_f32(f + 4)};
}
inline Floats load_f16(const uint8_t* p) {
  float16x8_t h = vreinterpretq_f16_u8(vld1q_u8(p));
  return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}
inline Floats mul(Floats v, Floats w) { return {vmulq_f32(v.a, w.a), vmulq_f32(v.b, w.b)}; }
inline Floats mul(Floats v, float s) { return {vmulq_n_f32(v.a, s), vmulq_n_f32(v.b, s)}; }
inline Floats fma(Floats acc, Floats v, float s) { return {vfmaq_n_f32(acc.a, v.a, s), vfmaq_n_f32(acc.b, v.b, s)}; }
inline Floats fma(Floats acc, Ints v, Floats w) {
  return {vfmaq_f32(acc.a, vcvtq_f32_s32(v.a), w.a), vfmaq_f32(acc.b, vcvtq_f32_s32(v.b), w.b)};
}
inline void store(float* y, Floats v) { vst1q_f32(y, v.a), vst1q_f32(y + 4, v.b); }

#elif defined(REGARD_AVX2)

struct Codes { __m256i v; };
struct Ints { __m256i v; };
struct Floats { __m256 v; };
struct Inputs { const int8_t* p; };

inline Codes load(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
// The bits that a shift moves from one byte to the next are removed by `mask`.
template <int N> inline Codes shift_right(Codes v) { return {_mm256_srli_epi16(v.v, N)}; }
template <int N> inline Codes shift_left(Codes v) { return {_mm256_slli_epi16(v.v, N)}; }
inline Codes mask(Codes v, uint8_t m) { return {_mm256_and_si256(v.v, _mm256_set1_epi8(char(m)))}; }
inline Codes merge(Codes v, Codes w) { return {_mm256_or_si256(v.v, w.v)}; }
inline Inputs load_inputs(const int8_t* p) { return {p}; }
inline Ints broadcast(int32_t v) { return {_mm256_set1_epi32(v)}; }
inline __m256i four(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}
// The instruction multiplies unsigned by signed bytes: 128 is added to signed codes, and `start` subtracts it again.
template <int LANE, bool SIGNED> inline Ints dot(Ints acc, Codes w, Inputs x) {
  __m256i codes = SIGNED ? _mm256_xor_si256(w.v, _mm256_set1_epi8(char(0x80))) : w.v;
  __m256i inputs = four(x.p + 4 * LANE);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return {_mm256_dpbusd_epi32(acc.v, codes, inputs)};
#elif defined(__AVXVNNI__)
  return {_mm256_dpbusd_avx_epi32(acc.v, codes, inputs)};
#else
  const __m256i low = _mm256_set1_epi16(0xff);  // even and odd bytes apart, since sums of two products can exceed int16
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(codes, low), _mm256_srai_epi16(_mm256_slli_epi16(inputs, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), _mm256_srai_epi16(inputs, 8));
  return {_mm256_add_epi32(acc.v, _mm256_add_epi32(even, odd))};
#endif
}
template <bool SIGNED> inline int32_t start(int32_t zero, int32_t sum) { return -(zero + (SIGNED ? 128 : 0)) * sum; }
inline Ints load_ints(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
inline Ints minus_product(Ints acc, Ints v, int32_t s) {
  return {_mm256_sub_epi32(acc.v, _mm256_mullo_epi32(v.v, _mm256_set1_epi32(s)))};
}
inline Floats to_floats(Ints v) { return {_mm256_cvtepi32_ps(v.v)}; }
inline Floats zeros() { return {_mm256_setzero_ps()}; }
inline Floats load_f32(const uint8_t* p) { return {_mm256_loadu_ps(reinterpret_cast<const float*>(p))}; }
inline Floats load_f16(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Floats mul(Floats v, Floats w) { return {_mm256_mul_ps(v.v, w.v)}; }
inline Floats mul(Floats v, float s) { return {_mm256_mul_ps(v.v, _mm256_set1_ps(s))}; }
inline Floats fma(Floats acc, Floats v, float s) { return {_mm256_fmadd_ps(v.v, _mm256_set1_ps(s), acc.v)}; }
inline Floats fma(Floats acc, Ints v, Floats w) { return {_mm256_fmadd_ps(_mm256_cvtepi32_ps(v.v), w.v, acc.v)}; }
inline void store(float* y, Floats v) { _mm256_storeu_ps(y, v.v); }

#else  // any machine

template <class T, int N> struct Array { T v[N]; };
using Codes = Array<uint8_t, 32>;
using Ints = Array<int32_t, TILE>;
using Floats = Array<float, TILE>;
struct Inputs { const int8_t* p; };

template <class Out, class F> inline Out each(F f) {
  Out out;
  for (size_t i = 0; i < sizeof(out.v) / sizeof(out.v[0]); i++) out.v[i] = f(i);
  return out;
}
inline Codes load(const uint8_t* p) { return each<Codes>([&](int i) { return p[i]; }); }
template <int N> inline Codes shift_right(Codes v) { return each<Codes>([&](int i) { return uint8_t(v.v[i] >> N); }); }
template <int N> inline Codes shift_left(Codes v) { return each<Codes>([&](int i) { return uint8_t(v.v[i] << N); }); }
inline Codes mask(Codes v, uint8_t m) { return each<Codes>([&](int i) { return uint8_t(v.v[i] & m); }); }
inline Codes merge(Codes v, Codes w) { return each<Codes>([&](int i) { return uint8_t(v.v[i] | w.v[i]); }); }
inline Inputs load_inputs(const int8_t* p) { return {p}; }
inline Ints broadcast(int32_t v) { return each<Ints>([&](int) { return v; }); }
template <int LANE, bool SIGNED> inline Ints dot(Ints acc, Codes w, Inputs x) {
  for (int i = 0; i < 32; i++) acc.v[i / 4] += int8_t(w.v[i]) * x.p[4 * LANE + i % 4];
  return acc;
}
template <bool SIGNED> inline int32_t start(int32_t zero, int32_t sum) { return -zero * sum; }
inline Ints load_ints(const uint8_t* p) { return each<Ints>([&](int i) { return int32_t(int8_t(p[i])); }); }
inline Ints minus_product(Ints acc, Ints v, int32_t s) {
  return each<Ints>([&](int i) { return acc.v[i] - v.v[i] * s; });
}
inline Floats to_floats(Ints v) { return each<Floats>([&](int i) { return float(v.v[i]); }); }
inline Floats zeros() { return each<Floats>([](int) { return 0.f; }); }
inline Floats load_f32(const uint8_t* p) {
  Floats out;
  std::memcpy(out.v, p, sizeof(out.v));
  return out;
}
inline float half(const uint8_t* p) {
  c10::Half h;
  std::memcpy(&h, p, 2);
  return h;
}
inline Floats load_f16(const uint8_t* p) { return each<Floats>([&](int i) { return half(p + 2 * i); }); }
inline Floats mul(Floats v, Floats w) { return each<Floats>([&](int i) { return v.v[i] * w.v[i]; }); }
inline Floats mul(Floats v, float s) { return each<Floats>([&](int i) { return v.v[i] * s; }); }
inline Floats fma(Floats acc, Floats v, float s) { return each<Floats>([&](int i) { return acc.v[i] + v.v[i] * s; }); }
inline Floats fma(Floats acc, Ints v, Floats w) {
  return each<Floats>([&](int i) { return acc.v[i] + float(v.v[i]) * w.v[i]; });
}
inline void store(float* y, Floats v) { std::memcpy(y, v.v, sizeof(v.v)); }

#endif

}  // namespace
}  // namespace regard
