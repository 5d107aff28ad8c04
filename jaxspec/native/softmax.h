// Exponentials and sums of a softmax, with the bits of pallas_kernels/steady.py and nn/steady.py.
#include "lanes.h"

#define UNROLLED _Pragma("GCC unroll 8")

typedef float four __attribute__((vector_size(16), aligned(4), may_alias));

INLINE floats all(float x) { return (floats){0} + x; }
INLINE floats choose(ints mask, floats yes, floats no) { return (floats)((mask & (ints)yes) | (~mask & (ints)no)); }

INLINE floats larger(floats a, floats b) {
#if defined(__AVX512F__)
  return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return choose(a > b, a, b);
#endif
}

INLINE floats multiply_add(floats a, floats b, floats c) {  // rounded once
#if defined(__FMA__) || defined(__aarch64__)
  return a * b + c;
#else
  for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

INLINE floats exponential(floats x) {  // of numbers up to 0: polynomial_exp of pallas_kernels/steady.py
  static const float factors[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  x = larger(x, all(-87.0f));
  ints whole = __builtin_convertvector(x * (float)(2 * 1.4426950408889634), ints) >> 1;
  floats power = __builtin_convertvector(whole, floats);
  floats rest = multiply_add(-power, all(0.693359375f), x);
  rest = multiply_add(-power, all(-2.12194440e-4f), rest);
  floats tail = all(1.9875691500e-4f);
  UNROLLED for (int i = 0; i < 5; i++) tail = multiply_add(tail, rest, all(factors[i]));
  return (multiply_add(tail, rest * rest, rest) + 1.0f) * (floats)((whole + 127) << 23);
}

static float halving_sum(float *x, int n) {  // of row_sum in nn/steady.py; changes x
  for (; n % (2 * LANES) == 0; n /= 2)
    for (int i = 0; i < n / 2; i += LANES) *(floats *)(x + i) += *(floats *)(x + n / 2 + i);
  for (; n % 8 == 0; n /= 2)
    for (int i = 0; i < n / 2; i += 4) *(four *)(x + i) += *(four *)(x + n / 2 + i);
  while (n > 1) {
    int half = (n + 1) / 2;
    for (int i = 0; i < n - half; i++) x[i] += x[half + i];
    n = half;
  }
  return x[0];
}

INLINE float largest(floats v) {
  UNROLLED for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) v[i] = v[i] > v[half + i] ? v[i] : v[half + i];
  return v[0];
}
