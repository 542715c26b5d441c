/* Programs, called by code that numba compiled, with Python's lock or without (`nogil`). */

/* An array as numba has it: its shape and strides are the numbers. */
struct Compiled {
  void *memory, *parent;
  int64_t items, itemsize;
  char *data;
  int64_t numbers[1];
};

/* numba's functions for memory that it counts the users of. */
struct Memory {
  void *(*make)(size_t bytes, unsigned align);
  char *(*data)(void *);
  void (*release)(void *);
};
static Memory memory;

static int ask_anywhere(void *frame) {
  return PyGILState_Check() ? PyErr_CheckSignals() : scanlib_ask(frame);
}

extern "C" void scanlib_set_memory(const Memory *given) { memory = *given; }

/* Makes an output of the shape in the table. */
static bool make_output(scanlib_call &call, int64_t k, Compiled *array) {
  const scanlib_array &kind = call.program->outputs[k];
  const int64_t *dims = call.dims(k);
  int64_t step = kind.itemsize;
  bool fine = true;
  for (int64_t i = kind.ndim; i-- > 0;) {
    array->numbers[i] = dims[i];
    array->numbers[kind.ndim + i] = step;
    fine = fine && dims[i] >= 0 && !__builtin_mul_overflow(step, dims[i], &step);
  }
  array->memory = fine && step < ((int64_t)1 << 62) ? memory.make(step, SCANLIB_LINE) : NULL;
  if (!array->memory) return false;
  array->parent = NULL;
  array->items = step / kind.itemsize, array->itemsize = kind.itemsize;
  array->data = memory.data(array->memory);
  call.use(k, array->data);
  return true;
}

/* Gives outputs that are full twice as many rows. */
static bool make_more_rows(scanlib_call &call, void **made) {
  call.double_rows();
  for (int64_t k = 0; k < call.program->n_outputs; k++) {
    if (!call.program->outputs[k].grows) continue;
    Compiled *array = (Compiled *)made[k];
    const Compiled old = *array;
    if (!make_output(call, k, array)) {
      array->memory = old.memory;
      return false;
    }
    memcpy(array->data, old.data, old.items * old.itemsize);
    memory.release(old.memory);
  }
  return true;
}

/* Cuts an output to the rows that are the result. */
static void cut_rows(scanlib_call &call, int64_t k, Compiled *array) {
  const scanlib_array &kind = call.program->outputs[k];
  const int64_t first = call.table[kind.first], rows = call.table[kind.first + 1];
  if (array->numbers[0]) array->items = array->items / array->numbers[0] * rows;
  array->data += first * array->numbers[kind.ndim];
  array->numbers[0] = rows;
}

/* Inputs and outputs are addresses: of arrays as numba has them, and of numbers. Returns zero, or -1
 * with an exception. A program is asked for by its key once in each module, which has a place for it. */
extern "C" int scanlib_compiled(const scanlib_program **place, const char *key, void **given,
                                void **made) {
  if (!*place) {
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject *found = PyObject_CallFunction(find_program, "s", key);
    if (found) *place = (const scanlib_program *)PyLong_AsVoidPtr(found);
    Py_XDECREF(found);
    PyGILState_Release(state);
    if (!*place) return -1;
  }
  const scanlib_program *program = *place;
  scanlib_call call(program);
  bool fine = call.table != NULL;
  for (int64_t k = 0; fine && k < program->n_inputs; k++) {
    const int64_t ndim = program->inputs[k].ndim;
    const Compiled *array = (const Compiled *)given[k];
    if (ndim)
      call.give(k, array->data, array->numbers, array->numbers + ndim);
    else
      call.give(k, array, NULL, NULL);
  }
  int64_t code = fine ? call.prepare() : 0, count = 0;
  for (; fine && !code && count < program->n_outputs; count++) {
    if (program->outputs[count].ndim)
      fine = make_output(call, count, (Compiled *)made[count]);
    else
      call.use(count, made[count]);
  }
  if (!fine) count--;
  fine = fine && (code || call.start());
  if (fine && !code) {
    code = call.run(&ask_anywhere);
    while (fine && code == SCANLIB_FULL) {
      fine = make_more_rows(call, made);
      if (fine) code = call.run(&ask_anywhere);
    }
  }
  const bool failed = !fine || code;
  for (int64_t k = 0; k < count; k++) {
    if (!program->outputs[k].ndim) continue;
    Compiled *array = (Compiled *)made[k];
    if (failed)
      memory.release(array->memory);
    else if (program->may_stop && program->outputs[k].grows)
      cut_rows(call, k, array);
  }
  if (!failed) return 0;
  const PyGILState_STATE state = PyGILState_Ensure();
  if (!fine)
    PyErr_NoMemory();
  else
    call.raise(code);
  PyGILState_Release(state);
  return -1;
}
