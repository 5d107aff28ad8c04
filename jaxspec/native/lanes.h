// Vectors as wide as the CPU's registers: a compiler makes poor code of wider ones.
#include "kernels.h"

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
