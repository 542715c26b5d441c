"""C++ templates for recurrences of small matrices, of sizes that the compiler knows.

``h = A h + b``, or ``h A + b``, with the state in registers. A fixed matrix is taken several steps
at once: its powers are computed before. See `scanlib.backends.c.linear_kernels`.
"""

SMALL_KERNELS = r"""
/* Steps of a small fixed matrix, AHEAD at once: columns in vectors. See the numba backend. */
template <class T, int SIZE, int AHEAD, bool OFFSET> struct scanlib_small {
  enum { LANES = SIZE <= 2 ? 2 : SIZE <= 4 ? 4 : 8 };
  typedef T vec __attribute__((vector_size(LANES * sizeof(T))));

  static vec load(const T *from) {
    vec result = {};
    memcpy(&result, from, SIZE * sizeof(T));
    return result;
  }
  static vec product(const vec *columns, const vec &state, const vec &start) {
    vec first = start, second = {};
    for (int j = 0; j < SIZE / 2; j++) first += columns[j] * state[j];
    for (int j = SIZE / 2; j < SIZE; j++) second += columns[j] * state[j];
    return first + second;
  }
  /* Takes n times AHEAD steps from `row`; returns whether all states are finite. */
  static bool run(T *row, npy_intp step, const vec (*powers)[SIZE], const T *offset,
                  npy_intp offset_step, npy_intp n) {
    vec state = load(row), check = {};
    for (npy_intp k = 0; k < n; k++) {
      vec constants[AHEAD];
      for (int q = 0; q < AHEAD; q++) {
        const vec zero = {};
        constants[q] = zero;
        if (!OFFSET) continue;
        const vec own = load(offset);
        offset += offset_step;
        constants[q] = q ? product(powers[0], constants[q - 1], own) : own;
      }
      vec next = state;
      for (int q = 0; q < AHEAD; q++) {
        row += step;
        next = product(powers[q], state, constants[q]);
        memcpy(row, &next, SIZE * sizeof(T));
        check += next * T(0);
      }
      state = next;
    }
    for (int i = 0; i < SIZE; i++)
      if (check[i] != check[i]) return false;
    return true;
  }
  /* Whether no power of the matrix is zero by underflow where a large state is not. */
  static bool composes(const T *columns) {
    const T high = sizeof(T) == 4 ? T(0x1p30f) : T(0x1p250), low = 1 / high;
    bool outside = false;
    for (int k = 0; k < SIZE * SIZE; k++) {
      const T item = std::fabs(columns[k]);
      outside |= !((item == 0) | ((item >= low) & (item <= high)));
    }
    return !outside;
  }
  /* Takes all steps; `again` repeats those of a block that are not finite, if it can. */
  template <class Again>
  static void all(T *row, npy_intp step, const T *columns, const T *offset, npy_intp offset_step,
                  npy_intp steps, Again again) {
    vec powers[AHEAD][SIZE];
    for (int j = 0; j < SIZE; j++) powers[0][j] = load(columns + j * SIZE);
    for (int q = 1; q < AHEAD; q++)
      for (int j = 0; j < SIZE; j++) {
        const vec zero = {};
        powers[q][j] = product(powers[q - 1], powers[0][j], zero);
      }
    const npy_intp block = 64;
    const bool whole = composes(columns);
    for (npy_intp done = 0; done < steps; done += block) {
      const npy_intp count = steps - done < block ? steps - done : block;
      if (!whole || count < block || !run(row, step, powers, offset, offset_step, block / AHEAD))
        if (!scanlib_small<T, SIZE, 1, OFFSET>::run(row, step, powers, offset, offset_step, count))
          again(done, count);
      row += count * step;
      if (OFFSET) offset += count * offset_step;
    }
  }
};

/* Steps of small matrices that differ from step to step: the state stays in registers, in a vector
 * where its items fill one, and columns are read without picking many items. */
template <class T, int SIZE, bool LEFT, bool OFFSET> struct scanlib_small_each {
  enum { WHOLE = SIZE == 2 || SIZE == 4 || (SIZE == 8 && !LEFT), LANES = WHOLE ? SIZE : 2 };
  typedef T vec __attribute__((vector_size(LANES * sizeof(T))));
  struct as_vector { vec values; };
  struct as_items { T values[SIZE]; };

  static vec load(const T *from) {
    vec result;
    memcpy(&result, from, sizeof(result));
    return result;
  }
  static void step(as_vector &state, const T *matrix, const T *offset) {
    const vec zero = {};
    vec first = OFFSET ? load(offset) : zero, second = zero, column;
#pragma GCC unroll 8
    for (int j = 0; j < SIZE; j++) {
#pragma GCC unroll 8
      for (int i = 0; LEFT && i < SIZE; i++) column[i] = matrix[i * SIZE + j];
      if (!LEFT) column = load(matrix + j * SIZE);
      (j < SIZE / 2 ? first : second) += column * state.values[j];
    }
    state.values = first + second;
  }
  static void step(as_items &state, const T *matrix, const T *offset) {
    as_items next;
#pragma GCC unroll 8
    for (int i = 0; i < SIZE; i++) {
      T first = OFFSET ? offset[i] : T(0), second = 0;
#pragma GCC unroll 8
      for (int j = 0; j < SIZE; j++)
        (j < SIZE / 2 ? first : second) +=
            matrix[LEFT ? i * SIZE + j : j * SIZE + i] * state.values[j];
      next.values[i] = first + second;
    }
    state = next;
  }
  static void all(T *__restrict row, npy_intp size, const T *matrix, const T *offset, npy_intp n) {
    typename std::conditional<WHOLE, as_vector, as_items>::type state;
    memcpy(&state, row, sizeof(state));
    for (npy_intp k = 0; k < n; k++) {
      step(state, matrix, offset);
      row += size;
      matrix += size * SIZE;
      if (OFFSET) offset += size;
      memcpy(row, &state, sizeof(state));
    }
  }
};
"""
