// Ghost batch normalisation: computes the statistics of each ghost batch and normalises it while it is still in cache.
//
// A tensor is [samples][channels][points], or channels-last [samples][points][channels]. Short partial sums in the
// tensor's own precision are accumulated in double, in a fixed order: results do not depend on the number of threads.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int BLOCK = 128;   // channels per thread and block in the channels-last layout
constexpr int LANES = 16;    // partial sums per channel where its points are contiguous
constexpr int64_t SHORT = 256;

struct Half {  // bfloat16
  uint16_t bits;
};

inline float load(const float* at) { return *at; }
inline double load(const double* at) { return *at; }
inline float load(const Half* at) {
  const uint32_t wide = static_cast<uint32_t>(at->bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
inline void store(float* at, float value) { *at = value; }
inline void store(double* at, double value) { *at = value; }
inline void store(Half* at, float value) {
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  // Rounds to nearest, ties to even; a NaN stays a NaN.
  const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
  at->bits = static_cast<uint16_t>(value == value ? rounded : (wide >> 16) | 0x40u);
}

struct Shape {
  int64_t channels, points, ghosts;
  const int64_t* first;  // [ghosts + 1], index of each ghost batch's first sample
  bool last;             // channels-last layout
  int threads;
};

// Calls work(ghost, first channel, number of channels) for every block of channels of every ghost batch, in parallel.
template <class F> void over(const Shape& shape, F work) {
  const int64_t step = shape.last ? BLOCK : 1;
  const int64_t blocks = (shape.channels + step - 1) / step, all = shape.ghosts * blocks;
  #pragma omp parallel for num_threads(shape.threads) schedule(static) if (shape.threads > 1)
  for (int64_t turn = 0; turn < all; ++turn) {
    const int64_t begin = turn % blocks * step, left = shape.channels - begin;
    work(turn / blocks, begin, left < step ? left : step);
  }
}

// Sums two terms per channel of a block over a ghost batch; f(a, b, x, index, channel) adds those of element x to a, b.
template <class A, class F>
void sums_last(const Shape& s, int64_t ghost, int64_t begin, int64_t width, double* a, double* b, F f) {
  const int64_t low = s.first[ghost] * s.points, high = s.first[ghost + 1] * s.points;
  for (int64_t c = 0; c < width; ++c) a[c] = b[c] = 0;
  for (int64_t row = low; row < high; row += SHORT) {
    A run_a[BLOCK] = {}, run_b[BLOCK] = {};
    const int64_t end = row + SHORT < high ? row + SHORT : high;
    for (int64_t r = row; r < end; ++r) {
      const int64_t at = r * s.channels + begin;
      #pragma omp simd
      for (int64_t c = 0; c < width; ++c) f(run_a[c], run_b[c], at + c, c);
    }
    for (int64_t c = 0; c < width; ++c) a[c] += run_a[c], b[c] += run_b[c];
  }
}

template <class A, class F>
void sums_first(const Shape& s, int64_t ghost, int64_t channel, double& a, double& b, F f) {
  a = b = 0;
  A run_a[LANES] = {}, run_b[LANES] = {};
  int64_t terms = 0;  // terms in each partial sum, over several samples
  const auto flush = [&] {
    for (int lane = 0; lane < LANES; ++lane) a += run_a[lane], b += run_b[lane], run_a[lane] = run_b[lane] = 0;
    terms = 0;
  };
  for (int64_t n = s.first[ghost]; n < s.first[ghost + 1]; ++n) {
    const int64_t base = (n * s.channels + channel) * s.points;
    for (int64_t begin = 0; begin < s.points; begin += SHORT * LANES) {
      const int64_t end = begin + SHORT * LANES < s.points ? begin + SHORT * LANES : s.points;
      int64_t i = begin;
      for (; i + LANES <= end; i += LANES)
        #pragma omp simd
        for (int lane = 0; lane < LANES; ++lane) f(run_a[lane], run_b[lane], base + i + lane);
      for (int lane = 0; i < end; ++i, ++lane) f(run_a[lane], run_b[lane], base + i);
      terms += (end - begin + LANES - 1) / LANES;
      if (terms >= SHORT) flush();
    }
  }
  flush();
}

// Calls each(index, channel of the block) for every element of a ghost batch.
template <class F> void every(const Shape& s, int64_t ghost, int64_t begin, int64_t width, F each) {
  if (s.last) {
    for (int64_t r = s.first[ghost] * s.points; r < s.first[ghost + 1] * s.points; ++r) {
      const int64_t at = r * s.channels + begin;
      #pragma omp simd
      for (int64_t c = 0; c < width; ++c) each(at + c, c);
    }
    return;
  }
  for (int64_t n = s.first[ghost]; n < s.first[ghost + 1]; ++n) {
    const int64_t base = (n * s.channels + begin) * s.points;
    #pragma omp simd
    for (int64_t i = 0; i < s.points; ++i) each(base + i, 0);
  }
}

// T: element type; A: type of the arithmetic, of the weights and of the statistics.
template <class T, class A>
void forward(const T* x, T* y, const A* weight, const A* bias, A* means, A* scales, double eps, const Shape& s) {
  over(s, [&](int64_t ghost, int64_t begin, int64_t width) {
    const double count = static_cast<double>((s.first[ghost + 1] - s.first[ghost]) * s.points);
    double a[BLOCK], b[BLOCK];
    A shift[BLOCK], mean[BLOCK], factor[BLOCK], offset[BLOCK];
    for (int64_t c = 0; c < width; ++c) {
      const int64_t at = s.last ? s.first[ghost] * s.points * s.channels + begin + c
                                : (s.first[ghost] * s.channels + begin) * s.points;
      shift[c] = load(x + at);  // shifted sums avoid cancellation: differences from one element
    }
    if (s.last)
      sums_last<A>(s, ghost, begin, width, a, b, [&](A& one, A& two, int64_t at, int64_t c) {
        const A d = load(x + at) - shift[c];
        one += d, two += d * d;
      });
    else
      sums_first<A>(s, ghost, begin, a[0], b[0], [&](A& one, A& two, int64_t at) {
        const A d = load(x + at) - shift[0];
        one += d, two += d * d;
      });
    for (int64_t c = 0; c < width; ++c) {
      const double variance = (b[c] - a[c] * a[c] / count) / count;
      const double scale = 1 / std::sqrt((variance > 0 ? variance : 0) + eps);
      mean[c] = static_cast<A>(shift[c] + a[c] / count);
      means[ghost * s.channels + begin + c] = mean[c];
      scales[ghost * s.channels + begin + c] = static_cast<A>(scale);
      factor[c] = static_cast<A>(scale) * (weight ? weight[begin + c] : A(1));
      offset[c] = bias ? bias[begin + c] : A(0);
    }
    every(s, ghost, begin, width, [&](int64_t at, int64_t c) {
      store(y + at, (load(x + at) - mean[c]) * factor[c] + offset[c]);
    });
  });
}

template <class T, class A>
void backward(const T* x, const T* dy, T* dx, const A* weight, const A* means, const A* scales, A* dweight, A* dbias,
              const Shape& s) {
  over(s, [&](int64_t ghost, int64_t begin, int64_t width) {
    const double count = static_cast<double>((s.first[ghost + 1] - s.first[ghost]) * s.points);
    const int64_t row = ghost * s.channels + begin;
    double a[BLOCK], b[BLOCK];
    A mean[BLOCK], scale[BLOCK], factor[BLOCK], plain[BLOCK], along[BLOCK];
    for (int64_t c = 0; c < width; ++c) mean[c] = means[row + c], scale[c] = scales[row + c];
    if (s.last)
      sums_last<A>(s, ghost, begin, width, a, b, [&](A& one, A& two, int64_t at, int64_t c) {
        const A d = load(dy + at);
        one += d, two += d * (load(x + at) - mean[c]);
      });
    else
      sums_first<A>(s, ghost, begin, a[0], b[0], [&](A& one, A& two, int64_t at) {
        const A d = load(dy + at);
        one += d, two += d * (load(x + at) - mean[0]);
      });
    for (int64_t c = 0; c < width; ++c) {
      dbias[row + c] = static_cast<A>(a[c]);
      dweight[row + c] = static_cast<A>(b[c] * scale[c]);
      factor[c] = scale[c] * (weight ? weight[begin + c] : A(1));
      plain[c] = static_cast<A>(a[c] / count);
      along[c] = static_cast<A>(b[c] / count) * scale[c] * scale[c];
    }
    every(s, ghost, begin, width, [&](int64_t at, int64_t c) {
      store(dx + at, (load(dy + at) - plain[c] - (load(x + at) - mean[c]) * along[c]) * factor[c]);
    });
  });
}

}  // namespace

#define PASSES(NAME, T, A)                                                                                             \
  extern "C" void ghost_forward_##NAME(const void* x, void* y, const void* weight, const void* bias, void* means,      \
                                       void* scales, double eps, int64_t channels, int64_t points, int64_t ghosts,     \
                                       const int64_t* first, int last, int threads) {                                  \
    forward<T, A>(static_cast<const T*>(x), static_cast<T*>(y), static_cast<const A*>(weight),                         \
                  static_cast<const A*>(bias), static_cast<A*>(means), static_cast<A*>(scales), eps,                   \
                  Shape{channels, points, ghosts, first, last != 0, threads});                                         \
  }                                                                                                                    \
  extern "C" void ghost_backward_##NAME(const void* x, const void* dy, void* dx, const void* weight,                   \
                                        const void* means, const void* scales, void* dweight, void* dbias,             \
                                        int64_t channels, int64_t points, int64_t ghosts, const int64_t* first,        \
                                        int last, int threads) {                                                       \
    backward<T, A>(static_cast<const T*>(x), static_cast<const T*>(dy), static_cast<T*>(dx),                           \
                   static_cast<const A*>(weight), static_cast<const A*>(means), static_cast<const A*>(scales),         \
                   static_cast<A*>(dweight), static_cast<A*>(dbias),                                                   \
                   Shape{channels, points, ghosts, first, last != 0, threads});                                        \
  }

PASSES(float, float, float)
PASSES(double, double, double)
PASSES(bfloat16, Half, float)
