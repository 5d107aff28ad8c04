// Vectors as wide as the CPU's registers: a compiler makes poor code of wider ones.
#include "kernels.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float floats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

// Rounds a product here, lest a compiler fuse it with an addition in one place and not in another.
#if defined(__x86_64__)
#define ROUND_HERE(product) __asm__("" : "+x"(product))
#elif defined(__aarch64__)
#define ROUND_HERE(product) __asm__("" : "+w"(product))
#else
#define ROUND_HERE(product) __asm__("" : "+m"(product))
#endif

// Whether a comparison holds in any lane.
INLINE int any(ints mask) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  int32_t found = 0;
  for (int lane = 0; lane < LANES; lane++) found |= mask[lane];
  return found != 0;
#endif
}

INLINE floats some(const float *x, int count) {  // up to so many, and -infinity beyond
  if (count >= LANES) return *(const floats *)x;
  floats s = (floats){0} - INFINITY;
  memcpy(&s, x, (size_t)count * 4);
  return s;
}
