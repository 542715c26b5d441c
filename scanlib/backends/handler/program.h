/* Calls the kernels of a loop: the steps that `scanlib/kernels/program.py` describes.
 *
 * A `scanlib_program` says of a loop what its callers have to know. Python fills it in and keeps it
 * as long as the process runs (`scanlib/backends/handler/programs.py`).
 */
#include <Python.h>
#include <chrono>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <vector>
#ifndef _WIN32
#include <pthread.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

enum { SCANLIB_FULL = -2, SCANLIB_INTERRUPTED = -1, SCANLIB_WORDS = 240 };
/* Words of a frame: what a poll says, its answer, and who is told. */
enum { SCANLIB_PROGRESS = 9, SCANLIB_ANSWER = 11, SCANLIB_TELL = 12, SCANLIB_FRAME = 13 };
enum { SCANLIB_DONE = -1, SCANLIB_FAILED = -2 }; /* instead of a number of steps */

/* Bytes of a line of the cache, `LINE` of `scanlib/kernels/spans.py`. The workspace and large arrays
 * begin where one does: their vectors lie in one line. */
enum { SCANLIB_LINE = 64 };

/* Much fresh memory gets pages of 2 MB, as NumPy's does: they are quicker to get than many of 4 KB. */
static void scanlib_ask_for_large_pages(void *start, size_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t page = 4096, first = ((uintptr_t)start + page - 1) & ~(page - 1);
  if (bytes >= 1 << 22) madvise((void *)first, bytes - page, MADV_HUGEPAGE);
#endif
}

/* An input or output: the word of its address, and for an output that of its first row. */
struct scanlib_array {
  int64_t word, ndim, type, itemsize, grows, extra, first;
};

typedef int64_t (*scanlib_kernel)(void *, void *);

/* Up to how large sizes may be numbers in kernels of their own, and for how many sets of them. */
enum { SCANLIB_SMALL = 32, SCANLIB_VARIANTS = 4 };

struct scanlib_program {
  scanlib_kernel prepare, start, runs[2], last_round, combine; /* NULL where there is nothing to do */
  int64_t n_inputs, n_outputs, n_functions, n_shared, n_sizes, n_variants;
  int64_t size, steps, capacity, begin, taken, workspace, workspace_size, part, parts, choice;
  int64_t functions;
  int64_t may_stop;
  int64_t tell; /* the function of Python's that is told how far a loop is, or zero */
  const scanlib_array *inputs, *outputs;
  const int64_t *addresses; /* of functions outside */
  const int64_t *shared;    /* outputs that are sums over the parts */
  const int64_t *sizes;     /* words of sizes that may be numbers in the kernels of a variant */
  const int64_t *variants;  /* of each, its sizes, zero for any large one, and its address */
  PyObject *fail;           /* raises what a code and the values of a frame stand for */
  PyObject *vary;           /* returns the address of the variant for some sizes */
};

/* Tells Python how far a loop is; an error there, before its last line too, ends the loop. */
static int scanlib_tell(void *frame) {
  int64_t *words = (int64_t *)frame;
  words[SCANLIB_ANSWER] = 1;
  ((void (*)(void *))(intptr_t)words[SCANLIB_TELL])(frame);
  return (int)words[SCANLIB_ANSWER];
}

static int64_t scanlib_run_part(const scanlib_program *program, int64_t *table, int64_t *frame) {
  return program->runs[table[program->choice]](table, frame);
}

/* A part of a loop in a thread of its own, which the operating system starts for each call: a pool
 * would not survive a fork. Once the first part, which alone can be interrupted, has ended early, so
 * do the others. Sums over the parts are added to those of the first in the order of the parts, so
 * that the number of parts alone decides, bit by bit, what comes out. */
struct scanlib_part {
  int64_t frame[SCANLIB_FRAME]; /* the first member: what a poll is given */
  const scanlib_program *program;
  const int *ended;
  std::vector<int64_t> table; /* with the addresses of the first part's sums behind it */
  bool has_thread;
#ifndef _WIN32
  pthread_t thread;
#endif

  static int ask(void *frame) {
    return __atomic_load_n(((scanlib_part *)frame)->ended, __ATOMIC_RELAXED);
  }
  static void *run(void *part) {
    scanlib_part *own = (scanlib_part *)part;
    scanlib_run_part(own->program, own->table.data(), own->frame);
    return NULL;
  }
  void begin(const scanlib_program *called, const int64_t *first, int64_t number, const int *flag) {
    program = called, ended = flag;
    memset(frame, 0, sizeof frame);
    frame[0] = (int64_t)(intptr_t)&ask;
    table.assign(first, first + program->size);
    table[program->part] += number;
    for (int64_t k = 0; k < program->n_shared; k++) {
      const scanlib_array &kind = program->outputs[program->shared[k]];
      int64_t items = 1;
      for (int64_t i = 0; i < kind.ndim; i++) items *= first[kind.word + 1 + i];
      table.push_back(first[kind.word]);
      table[kind.word] = (int64_t)(intptr_t)calloc(items ? items : 1, kind.itemsize);
    }
#ifdef _WIN32
    has_thread = false;
#else
    has_thread = !pthread_create(&thread, NULL, &run, this);
#endif
  }
  void finish() {
#ifndef _WIN32
    if (has_thread) pthread_join(thread, NULL);
#endif
    if (!has_thread) run(this);
    if (program->n_shared) program->combine(table.data(), frame);
    for (int64_t k = 0; k < program->n_shared; k++)
      free((void *)(intptr_t)table[program->outputs[program->shared[k]].word]);
  }
};

/* One call of a loop. */
struct scanlib_call {
  const scanlib_program *program;
  int64_t frame[SCANLIB_FRAME], own[SCANLIB_WORDS];
  int64_t *table;
  void *workspace;

  explicit scanlib_call(const scanlib_program *called) : program(called), workspace(NULL) {
    frame[0] = 0; /* nobody is asked by what runs before the steps */
    table = own;
    if (called->size > SCANLIB_WORDS) table = (int64_t *)malloc(called->size * sizeof(int64_t));
    if (table) take(called);
  }
  void take(const scanlib_program *called) {
    program = called;
    table[called->choice] = 0; /* `prepare` of one kernel alone says nothing */
    if (called->n_functions)
      memcpy(table + called->functions, called->addresses, called->n_functions * sizeof(int64_t));
  }
  ~scanlib_call() {
    if (table != own) free(table);
    if (workspace) free(workspace);
  }

  /* Strides may be those of another, wider array; NULL stands for those of contiguous memory. */
  void give(int64_t k, const void *data, const int64_t *dims, const int64_t *strides) {
    const scanlib_array &array = program->inputs[k];
    int64_t *words = table + array.word, step = array.itemsize;
    words[0] = (int64_t)(intptr_t)data;
    for (int64_t i = array.ndim; i-- > 0;) {
      words[1 + i] = dims[i];
      words[1 + array.ndim + i] = strides ? strides[i] : step;
      step *= dims[i];
    }
  }
  int64_t *dims(int64_t k) { return table + program->outputs[k].word + 1; }
  /* Makes room for twice as many rows of the outputs that grow; the loop goes on where it is. */
  void double_rows() {
    int64_t capacity = 2 * table[program->capacity];
    if (capacity > table[program->steps]) capacity = table[program->steps];
    table[program->begin] = table[program->taken];
    table[program->capacity] = capacity;
    for (int64_t k = 0; k < program->n_outputs; k++)
      if (program->outputs[k].grows) dims(k)[0] = capacity + program->outputs[k].extra;
  }
  void use(int64_t k, const void *data) {
    table[program->outputs[k].word] = (int64_t)(intptr_t)data;
  }

  /* Takes the program for arrays of these sizes, which may have to be compiled: false with an
   * exception. */
  bool vary() {
    const int64_t n = program->n_sizes;
    std::vector<int64_t> sizes(n);
    bool is_small = false;
    for (int64_t k = 0; k < n; k++) {
      const int64_t size = table[program->sizes[k]];
      if (size < 2 || size > SCANLIB_SMALL) continue; /* arrays of one item repeat themselves */
      sizes[k] = size, is_small = true;
    }
    const int64_t known = is_small ? __atomic_load_n(&program->n_variants, __ATOMIC_ACQUIRE) : 0;
    for (int64_t v = 0; v < known; v++) {
      const int64_t *own = program->variants + v * (n + 1);
      if (memcmp(own, sizes.data(), n * sizeof(int64_t))) continue;
      take((const scanlib_program *)(intptr_t)own[n]);
      return true;
    }
    if ((!is_small || known == SCANLIB_VARIANTS) && program->prepare) return true;
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject *found = PyObject_CallFunction(program->vary, "y#", (const char *)sizes.data(),
                                            (Py_ssize_t)(n * sizeof(int64_t)));
    if (found) take((const scanlib_program *)PyLong_AsVoidPtr(found));
    Py_XDECREF(found);
    PyGILState_Release(state);
    return found != NULL;
  }
  int64_t prepare() {
    if (program->n_sizes && !vary()) return SCANLIB_INTERRUPTED;
    return program->prepare(table, frame);
  }
  /* Returns whether there is memory. */
  bool start() {
    const int64_t bytes = table[program->workspace_size];
    workspace = bytes ? malloc(bytes + SCANLIB_LINE) : NULL;
    table[program->workspace] = ((intptr_t)workspace + SCANLIB_LINE - 1) & -SCANLIB_LINE;
    if (bytes && !workspace) return false;
    if (program->start) program->start(table, frame);
    return true;
  }
  /* Takes the steps. Polls call `ask`, if nobody is to be told how far they are. */
  int64_t run(int (*ask)(void *)) {
    frame[0] = (int64_t)(intptr_t)(program->tell ? &scanlib_tell : ask);
    frame[SCANLIB_TELL] = program->tell;
    int64_t code = run_parts();
    if (!code && program->last_round) code = program->last_round(table, frame);
    if (!program->tell || code == SCANLIB_FULL) return code;
    frame[SCANLIB_PROGRESS] = code ? SCANLIB_FAILED : SCANLIB_DONE;
    return scanlib_tell(frame) && !code ? (int64_t)SCANLIB_INTERRUPTED : code;
  }
  int64_t run_parts() {
    const int64_t parts = table[program->parts];
    if (parts <= 1) return scanlib_run_part(program, table, frame);
    int ended = 0;
    std::vector<scanlib_part> others(parts - 1);
    for (int64_t k = 1; k < parts; k++) others[k - 1].begin(program, table, k, &ended);
    const int64_t code = scanlib_run_part(program, table, frame);
    __atomic_store_n(&ended, code != 0, __ATOMIC_RELAXED);
    for (int64_t k = 1; k < parts; k++) others[k - 1].finish();
    return code;
  }

  /* Raises what a code stands for; Python's lock is held. */
  void raise(int64_t code) {
    if (code == SCANLIB_INTERRUPTED && PyErr_Occurred()) return; /* who interrupted it raised it */
    PyObject *done = PyObject_CallFunction(program->fail, "Ly#", (long long)code,
                                           (const char *)(frame + 1),
                                           (Py_ssize_t)sizeof(frame) - (Py_ssize_t)sizeof(*frame));
    Py_XDECREF(done);
  }
};

/* Asks Python, whose lock this thread does not hold, whether to go on: not often, since other threads
 * may have the lock for a while. */
static int scanlib_ask(void *) {
  using clock = std::chrono::steady_clock;
  static thread_local clock::time_point next;
  const clock::time_point now = clock::now();
  if (now < next) return 0;
  next = now + std::chrono::milliseconds(20);
  const PyGILState_STATE state = PyGILState_Ensure();
  const int wanted = PyErr_CheckSignals();
  PyGILState_Release(state);
  return wanted;
}
