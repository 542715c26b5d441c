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

enum { SCANLIB_FULL = -2, SCANLIB_INTERRUPTED = -1, SCANLIB_FRAME = 12, SCANLIB_WORDS = 240 };

/* The workspace begins where a line of the cache does: vectors of its arrays lie in one line. */
enum { SCANLIB_LINE = 64 };

/* An input or output: the word of its address, and for an output that of its first row. */
struct scanlib_array {
  int64_t word, ndim, type, itemsize, grows, extra, first;
};

struct scanlib_program {
  int64_t (*prepare)(void *, void *);
  int64_t (*start)(void *, void *);
  int64_t (*run)(void *, void *);
  int64_t n_inputs, n_outputs, n_functions;
  int64_t size, steps, capacity, begin, taken, workspace, workspace_size, functions;
  int64_t may_stop;
  int64_t ask; /* the function that polls call to tell how far they are, or zero */
  const scanlib_array *inputs, *outputs;
  const int64_t *addresses; /* of functions outside */
  PyObject *fail;           /* raises what a code and the values of a frame stand for */
};

/* One call of a loop. */
struct scanlib_call {
  const scanlib_program *program;
  int64_t frame[SCANLIB_FRAME], own[SCANLIB_WORDS];
  int64_t *table;
  void *workspace;

  explicit scanlib_call(const scanlib_program *called) : program(called), workspace(NULL) {
    memset(frame, 0, sizeof frame);
    table = own;
    if (called->size > SCANLIB_WORDS) table = (int64_t *)malloc(called->size * sizeof(int64_t));
    if (table)
      memcpy(table + called->functions, called->addresses, called->n_functions * sizeof(int64_t));
  }
  ~scanlib_call() {
    if (table != own) free(table);
    free(workspace);
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
  void use(int64_t k, const void *data) {
    table[program->outputs[k].word] = (int64_t)(intptr_t)data;
  }

  int64_t prepare() { return program->prepare(table, frame); }
  /* Returns whether there is memory. */
  bool start() {
    const int64_t bytes = table[program->workspace_size];
    workspace = malloc(bytes + SCANLIB_LINE);
    table[program->workspace] = ((intptr_t)workspace + SCANLIB_LINE - 1) & -SCANLIB_LINE;
    if (!workspace) return false;
    program->start(table, frame);
    return true;
  }
  int64_t run() { return program->run(table, frame); }

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
