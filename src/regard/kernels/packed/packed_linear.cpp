// y = W' x for weights W' of 2 to 8 bits, on a CPU. The layouts of the weights are those of layouts.py.
//
//     W' = s (q - z) + m            s, z, m: scale, zero point and minimum of 16, 32 or more inputs of one output
//     x ≈ d p                       p: integers from -127 to 127, d = max |x| / 127 of 32 inputs
//     y = Σ s d (Σ q p - z Σ p) + m d Σ p
//
// The inner sums are exact, in int32; the outer one is in float32. Eight outputs are computed at a time: a chunk are 32
// codes, of eight outputs and four inputs each, which one or two instructions multiply by four numbers of x.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#if defined(REGARD_PORTABLE)  // to test the code for other machines
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define REGARD_NEON
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#include <immintrin.h>
#define REGARD_AVX2
#endif

namespace {

constexpr int TILE = 8;    // outputs
constexpr int BLOCK = 32;  // inputs that are multiplied before the sums become floats

// The vectors of a machine: Codes (32 bytes), Ints and Floats (eight numbers, one per output).

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

// The inputs in eight bits.

struct Row {
  std::vector<int8_t> values;  // p
  std::vector<float> scales;   // d of every block
  std::vector<int32_t> sums;   // Σ p of every 16 inputs
};

void quantize(const float* x, int64_t blocks, int8_t* values, float* scales, int32_t* sums) {
  for (int64_t b = 0; b < blocks; b++, x += BLOCK, values += BLOCK, sums += 2) {
    float largest[TILE] = {}, check[TILE] = {};  // in lanes, so that the compiler makes them vectors
    for (int i = 0; i < BLOCK; i += TILE)
      for (int j = 0; j < TILE; j++) {
        largest[j] = std::max(largest[j], std::abs(x[i + j]));
        check[j] += x[i + j] * 0;  // NaN if x is not finite
      }
    const float scale = *std::max_element(largest, largest + TILE) / 127;
    float nan = 0;
    for (float c : check) nan += c;
    scales[b] = scale + nan;
    const float inverse = nan == 0 && scale > 0 ? 1 / scale : 0;
    for (int h = 0; h < 2; h++) {
      int32_t sum = 0;
      for (int i = 16 * h; i < 16 * h + 16; i++) {
        const float value = nan == 0 ? x[i] * inverse : 0;
        values[i] = int8_t(std::nearbyint(value));
        sum += values[i];
      }
      sums[h] = sum;
    }
  }
}

// The layouts. Per block: scales of its groups, then the codes in planes of 4, 2 and 1 bits, or of 8.

enum class Scales { f32_header, f16_header, f16, k };

template <int BITS_, int ZERO_, int GROUP_, Scales SCALES_, bool SECOND> struct Layout {
  static constexpr int BITS = BITS_, ZERO = ZERO_, GROUP = GROUP_;
  static constexpr Scales SCALES = SCALES_;
  static constexpr bool SIGNED = BITS == 8;
  static constexpr bool INTEGERS = SCALES == Scales::f32_header || SCALES == Scales::f16_header;
  static constexpr bool ZEROS = SECOND && INTEGERS, MIN = SECOND && !INTEGERS;
  static constexpr int GROUPS = BLOCK / GROUP;  // per block
  static constexpr int HEADER_SCALE = SCALES == Scales::f32_header ? 4 * TILE : 2 * TILE;
  static constexpr int HEADER = SCALES == Scales::f16 ? 0 : HEADER_SCALE * (MIN ? 2 : 1) + (ZEROS ? TILE : 0);
  static constexpr int SCALE = SCALES == Scales::f16 ? 2 * TILE : TILE;
  static constexpr int SCALE_BYTES = INTEGERS ? 0 : SCALE * (MIN ? 2 : 1);
  static constexpr int BYTES = GROUPS * SCALE_BYTES + TILE * BLOCK * BITS / 8;
};

// Chunk C of a block, from the planes of its codes
template <class L, int C> inline Codes decode(const uint8_t* p) {
  if constexpr (L::BITS == 8) {
    return load(p + 32 * C);
  } else {
    constexpr int two = L::BITS >= 4 ? 4 * TILE * BLOCK / 8 : 0;  // where the plane of two bits begins
    constexpr int one = two + (L::BITS % 4 >= 2 ? 2 * TILE * BLOCK / 8 : 0);
    Codes codes;
    if constexpr (L::BITS >= 4) {
      Codes v = load(p + 32 * (C / 2));
      codes = mask(shift_right<C % 2 * 4>(v), 15);
      if constexpr (L::BITS == 6) {
        Codes high = mask(shift_right<2 * (C % 4)>(load(p + two + 32 * (C / 4))), 3);
        codes = merge(codes, shift_left<4>(high));
      }
    } else {
      codes = mask(shift_right<2 * (C % 4)>(load(p + two + 32 * (C / 4))), 3);
    }
    if constexpr (L::BITS % 2 == 1) {
      Codes high = mask(shift_right<C>(load(p + one)), 1);
      codes = merge(codes, shift_left<L::BITS - 1>(high));
    }
    return codes;
  }
}

struct X {  // rows of quantized inputs
  const int8_t* values;
  const float* scales;
  const int32_t* sums;
  int64_t inputs;
};

// The sums of four chunks, from 4 HALF on, for ROWS rows of x
template <class L, int ROWS, int HALF, int... C>
inline void add_products(Ints (&acc)[ROWS], const uint8_t* codes, const Inputs (&x)[ROWS],
                         std::integer_sequence<int, C...>) {
  auto add = [&](auto chunk) {
    constexpr int c = decltype(chunk)::value;
    Codes w = decode<L, 4 * HALF + c>(codes);
    for (int r = 0; r < ROWS; r++) acc[r] = dot<c, L::SIGNED>(acc[r], w, x[r]);
  };
  (add(std::integral_constant<int, C>{}), ...);
}

// Eight outputs of ROWS rows. per_header: blocks that share a header
template <class L, int ROWS> void tile(const uint8_t* w, int64_t blocks, int64_t per_header, X x, Floats (&out)[ROWS]) {
  using Chunks = std::make_integer_sequence<int, 4>;
  for (auto& y : out) y = zeros();
  Floats d = zeros(), dmin = zeros();
  Ints zero = broadcast(0);
  int64_t left = 0;  // blocks until the next header
  for (int64_t b = 0; b < blocks; b++, left--) {
    if (L::HEADER > 0 && left == 0) {
      d = L::SCALES == Scales::f32_header ? load_f32(w) : load_f16(w);
      if constexpr (L::MIN) dmin = load_f16(w + L::HEADER_SCALE);
      if constexpr (L::ZEROS) zero = load_ints(w + L::HEADER_SCALE);
      w += L::HEADER;
      left = per_header;
    }
    __builtin_prefetch(w + 1024);
    const uint8_t* codes = w + L::GROUPS * L::SCALE_BYTES;
    Inputs first[ROWS], second[ROWS];
    for (int r = 0; r < ROWS; r++) {
      const int8_t* values = x.values + r * x.inputs + b * BLOCK;
      first[r] = load_inputs(values), second[r] = load_inputs(values + 16);
    }
    Ints acc[ROWS];
    auto begin = [&](auto sum) {
      for (int r = 0; r < ROWS; r++) {
        acc[r] = broadcast(start<L::SIGNED>(L::ZERO, sum(r)));
        if constexpr (L::ZEROS) acc[r] = minus_product(acc[r], zero, sum(r));
      }
    };
    auto finish = [&](int group, auto sum) {
      const uint8_t* p = w + group * L::SCALE_BYTES;
      Floats s = d, m = zeros();
      if constexpr (L::SCALES == Scales::f16) s = load_f16(p);
      if constexpr (L::SCALES == Scales::k) s = mul(to_floats(load_ints(p)), d);
      if constexpr (L::MIN) {
        const uint8_t* minimum = p + L::SCALE;
        m = L::SCALES == Scales::f16 ? load_f16(minimum) : mul(to_floats(load_ints(minimum)), dmin);
      }
      for (int r = 0; r < ROWS; r++) {
        const float scale = x.scales[r * x.inputs / BLOCK + b];
        out[r] = fma(out[r], acc[r], mul(s, scale));
        if constexpr (L::MIN) out[r] = fma(out[r], m, scale * float(sum(r)));
      }
    };
    auto sums = [&](int r) { return x.sums + r * x.inputs / 16 + 2 * b; };
    if constexpr (L::GROUPS == 1) {
      auto sum = [&](int r) { return sums(r)[0] + sums(r)[1]; };
      begin(sum);
      add_products<L, ROWS, 0>(acc, codes, first, Chunks{});
      add_products<L, ROWS, 1>(acc, codes, second, Chunks{});
      finish(0, sum);
    } else {
      auto first_sum = [&](int r) { return sums(r)[0]; };
      auto second_sum = [&](int r) { return sums(r)[1]; };
      begin(first_sum);
      add_products<L, ROWS, 0>(acc, codes, first, Chunks{});
      finish(0, first_sum);
      begin(second_sum);
      add_products<L, ROWS, 1>(acc, codes, second, Chunks{});
      finish(1, second_sum);
    }
    w += L::BYTES;
  }
}

template <class L, int ROWS>
inline void tile_to(const uint8_t* w, int64_t blocks, int64_t per_header, X x, float* y, int64_t outputs, int64_t n) {
  Floats out[ROWS];
  tile<L, ROWS>(w, blocks, per_header, x, out);
  for (int r = 0; r < ROWS; r++) {
    float* to = y + r * outputs + n;
    if (n + TILE <= outputs) {
      store(to, out[r]);
    } else {
      float values[TILE];
      store(values, out[r]);
      std::copy(values, values + (outputs - n), to);
    }
  }
}

template <class L>
void product(const uint8_t* w, X x, float* y, int64_t rows, int64_t outputs, int64_t per_header, int64_t tile_bytes) {
  const int64_t tiles = (outputs + TILE - 1) / TILE, blocks = x.inputs / BLOCK;
  at::parallel_for(0, tiles, std::max<int64_t>(1, 32768 / (tile_bytes * rows)), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const uint8_t* from = w + t * tile_bytes;
      for (int64_t r = 0; r < rows;) {
        X part{x.values + r * x.inputs, x.scales + r * blocks, x.sums + r * blocks * 2, x.inputs};
        float* to = y + r * outputs;
        const int64_t n = t * TILE, count = std::min<int64_t>(rows - r, 4);
        if (count == 4) tile_to<L, 4>(from, blocks, per_header, part, to, outputs, n);
        else if (count == 3) tile_to<L, 3>(from, blocks, per_header, part, to, outputs, n);
        else if (count == 2) tile_to<L, 2>(from, blocks, per_header, part, to, outputs, n);
        else tile_to<L, 1>(from, blocks, per_header, part, to, outputs, n);
        r += count;
      }
    }
  });
}

using Product = void (*)(const uint8_t*, X, float*, int64_t, int64_t, int64_t, int64_t);
const Product PRODUCTS[] = {  // in the order of layouts.py
    product<Layout<8, 0, 32, Scales::f32_header, false>>, product<Layout<8, 0, 32, Scales::f32_header, true>>,
    product<Layout<4, 8, 32, Scales::f32_header, false>>, product<Layout<4, 0, 32, Scales::f32_header, true>>,
    product<Layout<8, 0, 32, Scales::f16_header, false>>, product<Layout<8, 0, 32, Scales::f16_header, true>>,
    product<Layout<4, 8, 32, Scales::f16_header, false>>, product<Layout<4, 0, 32, Scales::f16_header, true>>,
    product<Layout<8, 0, 32, Scales::f16, false>>, product<Layout<4, 8, 32, Scales::f16, false>>,
    product<Layout<4, 0, 32, Scales::f16, true>>,  product<Layout<5, 16, 32, Scales::f16, false>>,
    product<Layout<5, 0, 32, Scales::f16, true>>,  product<Layout<2, 0, 16, Scales::k, true>>,
    product<Layout<3, 4, 16, Scales::k, false>>,   product<Layout<4, 0, 32, Scales::k, true>>,
    product<Layout<5, 0, 32, Scales::k, true>>,    product<Layout<6, 32, 16, Scales::k, false>>,
};

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, int64_t outputs, int64_t layout, int64_t per_header) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous() && packed.is_contiguous());
  const int64_t inputs = x.size(-1), rows = inputs ? x.numel() / inputs : 0, blocks = inputs / BLOCK;
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  at::Tensor y = at::empty(shape, x.options());
  if (rows == 0) return y;
  thread_local Row row;
  row.values.resize(rows * inputs), row.scales.resize(rows * blocks), row.sums.resize(rows * blocks * 2);
  Row& to = row;
  const float* from = x.const_data_ptr<float>();
  at::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      quantize(from + r * inputs, blocks, &to.values[r * inputs], &to.scales[r * blocks], &to.sums[r * blocks * 2]);
  });
  X quantized{row.values.data(), row.scales.data(), row.sums.data(), inputs};
  PRODUCTS[layout](packed.const_data_ptr<uint8_t>(), quantized, y.mutable_data_ptr<float>(), rows, outputs, per_header,
                   packed.size(1));
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(regard, m) {
  m.def("packed_linear(Tensor x, Tensor packed, int outputs, int layout, int per_header) -> Tensor");
}
TORCH_LIBRARY_IMPL(regard, CPU, m) { m.impl("packed_linear", &packed_linear); }
