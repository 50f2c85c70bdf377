// Fused loops over the tensors of an optimizer, for float and double. One call reads each number once from memory.
//
// Results are bit-identical for any number of threads, any alignment, any SIMD width and any other tensors in the call:
// the order of each summation is fixed (LANES partial sums over SHORT numbers, accumulated in double), a chunk never
// spans two tensors, chunks are added in order, and the compiler does not contract multiplications and additions (FMA).

#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t CHUNK = 16384;
constexpr int64_t SHORT = 1024;
constexpr int LANES = 32;

// Columns of the address table, one row per tensor: parameter, gradient, first and second state (or 0), element count.
constexpr int ADDRESSES = 5;

struct Rows {
  int64_t count;
  const int64_t* addresses;  // [count, ADDRESSES]
  const int64_t* first;      // [count + 1], number of each row's first chunk
  int threads;

  template <class T> T* at(int64_t row, int which, int64_t start) const {
    T* base = reinterpret_cast<T*>(addresses[row * ADDRESSES + which]);
    return base ? base + start : base;
  }
};

template <class F> void over_chunks(const Rows& rows, bool backwards, F each) {
  const int64_t chunks = rows.first[rows.count];
  #pragma omp parallel for num_threads(rows.threads) schedule(static) if (rows.threads > 1)
  for (int64_t turn = 0; turn < chunks; ++turn) {
    const int64_t chunk = backwards ? chunks - 1 - turn : turn;
    int64_t row = 0, above = rows.count;
    while (above - row > 1) {
      const int64_t middle = (row + above) / 2;
      (rows.first[middle] <= chunk ? row : above) = middle;
    }
    const int64_t start = (chunk - rows.first[row]) * CHUNK, left = rows.addresses[row * ADDRESSES + 4] - start;
    each(row, chunk, start, left < CHUNK ? left : CHUNK);
  }
}

// Sums two terms over n elements: f(i, a, b) adds the terms of element i to a and b. Writes both sums to `sums`.
template <class T, class F> void sum(int64_t n, double* sums, F f) {
  double whole_a[LANES] = {}, whole_b[LANES] = {};
  for (int64_t begin = 0; begin < n; begin += SHORT) {
    const int64_t end = begin + SHORT < n ? begin + SHORT : n;
    T a[LANES] = {}, b[LANES] = {};
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES)
      for (int lane = 0; lane < LANES; ++lane) f(i + lane, a[lane], b[lane]);
    for (int lane = 0; i < end; ++i, ++lane) f(i, a[lane], b[lane]);
    for (int lane = 0; lane < LANES; ++lane) {
      whole_a[lane] += a[lane];
      whole_b[lane] += b[lane];
    }
  }
  sums[0] = sums[1] = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    sums[0] += whole_a[lane];
    sums[1] += whole_b[lane];
  }
}

void gather(const Rows& rows, const double* partial, double* squares) {
  for (int64_t row = 0; row < rows.count; ++row) {
    double a = 0, b = 0;
    for (int64_t chunk = rows.first[row]; chunk < rows.first[row + 1]; ++chunk) {
      a += partial[2 * chunk];
      b += partial[2 * chunk + 1];
    }
    squares[2 * row] = a;
    squares[2 * row + 1] = b;
  }
}

// squares[row] = (0, |g|^2)
template <class T> void squares(const Rows& rows, const double*, double* partial, double* result) {
  over_chunks(rows, false, [&](int64_t row, int64_t chunk, int64_t start, int64_t n) {
    const T* __restrict g = rows.at<T>(row, 1, start);
    sum<T>(n, partial + 2 * chunk, [=](int64_t i, T&, T& b) { b += g[i] * g[i]; });
  });
  gather(rows, partial, result);
}

// squares[row] = (|w g|^2, |g|^2), with the factors w in the parameter's place
template <class T> void scaled_squares(const Rows& rows, const double*, double* partial, double* result) {
  over_chunks(rows, false, [&](int64_t row, int64_t chunk, int64_t start, int64_t n) {
    const T* __restrict w = rows.at<T>(row, 0, start);
    const T* __restrict g = rows.at<T>(row, 1, start);
    sum<T>(n, partial + 2 * chunk, [=](int64_t i, T& a, T& b) {
      const T d = w[i] * g[i];
      a += d * d;
      b += g[i] * g[i];
    });
  });
  gather(rows, partial, result);
}

// squares[row] = (|w|^2, |gradient g + decay w|^2)
template <class T> void decayed_squares(const Rows& rows, const double* options, double* partial, double* result) {
  over_chunks(rows, false, [&](int64_t row, int64_t chunk, int64_t start, int64_t n) {
    const T* __restrict w = rows.at<T>(row, 0, start);
    const T* __restrict g = rows.at<T>(row, 1, start);
    const T gradient = options[2 * row], decay = options[2 * row + 1];
    sum<T>(n, partial + 2 * chunk, [=](int64_t i, T& a, T& b) {
      const T d = gradient * g[i] + decay * w[i];
      a += w[i] * w[i];
      b += d * d;
    });
  });
  gather(rows, partial, result);
}

// d = gradient g + decay w;  b = keep b + take d;  w = w - (direct d + buffered b + shrink w)
template <class T> void momentum(const Rows& rows, const double* options, double*, double*) {
  over_chunks(rows, true, [&](int64_t row, int64_t, int64_t start, int64_t n) {
    T* __restrict w = rows.at<T>(row, 0, start);
    const T* __restrict g = rows.at<T>(row, 1, start);
    T* __restrict b = rows.at<T>(row, 2, start);
    const double* o = options + 7 * row;
    const T gradient = o[0], decay = o[1], keep = o[2], take = o[3], direct = o[4], buffered = o[5], shrink = o[6];
    if (b) {
      for (int64_t i = 0; i < n; ++i) {
        const T d = gradient * g[i] + decay * w[i];
        b[i] = keep * b[i] + take * d;
        w[i] -= direct * d + buffered * b[i] + shrink * w[i];
      }
    } else {
      for (int64_t i = 0; i < n; ++i) w[i] -= direct * (gradient * g[i] + decay * w[i]) + shrink * w[i];
    }
  });
}

template <class T> inline T direction(T w, T m, T v, T scale1, T scale2, T eps, T decay) {
  return scale1 * m / (scale2 * std::sqrt(v) + eps) + decay * w;
}

// h = gradient g;  m = keep1 m + take1 h;  v = keep2 v + take2 h^2;  squares[row] = (|w|^2, |direction|^2)
template <class T> void adam_squares(const Rows& rows, const double* options, double* partial, double* result) {
  over_chunks(rows, false, [&](int64_t row, int64_t chunk, int64_t start, int64_t n) {
    const T* __restrict w = rows.at<T>(row, 0, start);
    const T* __restrict g = rows.at<T>(row, 1, start);
    T* __restrict m = rows.at<T>(row, 2, start);
    T* __restrict v = rows.at<T>(row, 3, start);
    const double* o = options + 9 * row;
    const T gradient = o[0], keep1 = o[1], take1 = o[2], keep2 = o[3], take2 = o[4];
    const T scale1 = o[5], scale2 = o[6], eps = o[7], decay = o[8];
    sum<T>(n, partial + 2 * chunk, [=](int64_t i, T& a, T& b) {
      const T h = gradient * g[i];
      m[i] = keep1 * m[i] + take1 * h;
      v[i] = keep2 * v[i] + take2 * (h * h);
      const T u = direction(w[i], m[i], v[i], scale1, scale2, eps, decay);
      a += w[i] * w[i];
      b += u * u;
    });
  });
  gather(rows, partial, result);
}

// w = w - (rate direction + shrink w)
template <class T> void adam_step(const Rows& rows, const double* options, double*, double*) {
  over_chunks(rows, true, [&](int64_t row, int64_t, int64_t start, int64_t n) {
    T* __restrict w = rows.at<T>(row, 0, start);
    const T* __restrict m = rows.at<T>(row, 2, start);
    const T* __restrict v = rows.at<T>(row, 3, start);
    const double* o = options + 6 * row;
    const T scale1 = o[0], scale2 = o[1], eps = o[2], decay = o[3], rate = o[4], shrink = o[5];
    for (int64_t i = 0; i < n; ++i)
      w[i] -= rate * direction(w[i], m[i], v[i], scale1, scale2, eps, decay) + shrink * w[i];
  });
}

}  // namespace

// name_float(count, addresses, first, threads, options, partial, squares), and the same for double.
#define PASS(name)                                                                                                     \
  extern "C" void name##_float(int64_t count, const int64_t* addresses, const int64_t* first, int threads,             \
                               const double* options, double* partial, double* result) {                               \
    name<float>({count, addresses, first, threads}, options, partial, result);                                         \
  }                                                                                                                    \
  extern "C" void name##_double(int64_t count, const int64_t* addresses, const int64_t* first, int threads,            \
                                const double* options, double* partial, double* result) {                              \
    name<double>({count, addresses, first, threads}, options, partial, result);                                        \
  }

PASS(squares)
PASS(scaled_squares)
PASS(decayed_squares)
PASS(momentum)
PASS(adam_squares)
PASS(adam_step)

extern "C" int64_t chunk_size() { return CHUNK; }
