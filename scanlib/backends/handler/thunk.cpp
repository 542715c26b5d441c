/* Loops on NumPy arrays: thunks for PyTensor's C linker, and calls from Python. */
#define PY_SSIZE_T_CLEAN
#include "program.h"
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>

#include "lines.h"

/* Runs that may be so long, or write so much, leave Python's lock to other threads. */
enum { MANY_STEPS = 10000, MANY_BYTES = 1 << 20 };

static int scanlib_signals(void *) { return PyErr_CheckSignals(); }

static PyObject *find_program;

/* `find` returns the address of the program of a key. */
extern "C" int scanlib_set_up(PyObject *find) {
  Py_INCREF(find);
  find_program = find;
  return _import_array();
}

/* Returns an input as the kernels read it, NULL with an exception if they cannot. */
static PyArrayObject *checked(PyObject *value, const scanlib_array &kind) {
  PyArrayObject *array = (PyArrayObject *)value;
  if (PyArray_Check(value)) {
    Py_INCREF(value);
  } else if (kind.ndim == 0 && value != Py_None && PyArray_IsAnyScalar(value)) {
    array = (PyArrayObject *)PyArray_FROM_OT(value, (int)kind.type);
    if (!array) return NULL;
  } else {
    PyErr_SetString(PyExc_ValueError, value == Py_None ? "expected an ndarray, not None"
                                                       : "expected an ndarray");
    return NULL;
  }
  if (PyArray_NDIM(array) != kind.ndim) {
    PyErr_Format(PyExc_TypeError, "expected an array of %d dimensions, got one of %d",
                 (int)kind.ndim, PyArray_NDIM(array));
  } else if (PyArray_TYPE(array) != kind.type &&
             !PyArray_EquivTypenums(PyArray_TYPE(array), (int)kind.type)) {
    PyArray_Descr *wanted = PyArray_DescrFromType((int)kind.type);
    PyErr_Format(PyExc_TypeError, "expected an array of dtype %S, got %S", wanted,
                 PyArray_DESCR(array));
    Py_XDECREF(wanted);
  } else if (PyArray_ISALIGNED(array) && PyArray_ISNOTSWAPPED(array)) {
    return array;
  } else {
    PyObject *copy = PyArray_FROM_OF((PyObject *)array, NPY_ARRAY_ALIGNED | NPY_ARRAY_NOTSWAPPED);
    Py_DECREF(array);
    return (PyArrayObject *)copy;
  }
  Py_DECREF(array);
  return NULL;
}

/* Whether a result can be written where the one of an earlier call is, which nobody else has. */
static bool fits(PyArrayObject *old, const scanlib_array &kind, npy_intp *dims) {
  return old && Py_REFCNT(old) == 1 && PyArray_CheckExact(old) &&
         PyArray_NDIM(old) == kind.ndim && PyArray_TYPE(old) == kind.type &&
         PyArray_CHKFLAGS(old, NPY_ARRAY_CARRAY | NPY_ARRAY_OWNDATA) &&
         PyArray_CompareLists(PyArray_DIMS(old), dims, (int)kind.ndim);
}

struct Arrays {
  const scanlib_program *program;
  PyArrayObject *few[16], **inputs, **outputs;
  scanlib_call call;

  Arrays(const scanlib_program *called) : program(called), few(), call(called) {
    const size_t count = called->n_inputs + called->n_outputs;
    inputs = few;
    if (count > sizeof few / sizeof *few) {
      inputs = (PyArrayObject **)calloc(count, sizeof *inputs);
    }
    outputs = inputs ? inputs + called->n_inputs : NULL;
  }
  ~Arrays() {
    const int64_t count = inputs ? program->n_inputs + program->n_outputs : 0;
    for (int64_t k = 0; k < count; k++) Py_XDECREF(inputs[k]);
    if (inputs != few) free(inputs);
  }

  PyArrayObject *fresh(int64_t k) {
    const scanlib_array &kind = program->outputs[k];
    PyObject *array = new_array((int)kind.ndim, (npy_intp *)call.dims(k), (int)kind.type);
    if (!array && PyErr_ExceptionMatches(PyExc_ValueError)) { /* so many items have no address */
      PyErr_SetString(PyExc_MemoryError, "a result is too large");
    }
    return (PyArrayObject *)array;
  }

  /* Gives outputs that are full twice as many rows. */
  bool grow() {
    call.double_rows();
    for (int64_t k = 0; k < program->n_outputs; k++) {
      if (!program->outputs[k].grows) continue;
      PyArrayObject *longer = fresh(k);
      if (!longer) return false;
      memcpy(PyArray_DATA(longer), PyArray_DATA(outputs[k]), PyArray_NBYTES(outputs[k]));
      Py_DECREF(outputs[k]);
      outputs[k] = longer;
      call.use(k, PyArray_DATA(longer));
    }
    return true;
  }

  /* Cuts outputs to the rows that are the result. */
  bool cut() {
    for (int64_t k = 0; k < program->n_outputs; k++) {
      const scanlib_array &kind = program->outputs[k];
      if (!program->may_stop || !kind.grows) continue;
      const int64_t first = call.table[kind.first], rows = call.table[kind.first + 1];
      if (rows == PyArray_DIM(outputs[k], 0)) continue;
      PyObject *view = PySequence_GetSlice((PyObject *)outputs[k], first, first + rows);
      if (!view) return false;
      Py_DECREF(outputs[k]);
      outputs[k] = (PyArrayObject *)view;
    }
    return true;
  }

  int64_t steps_of(bool is_long) {
    int64_t code;
    do {
      PyThreadState *state = is_long ? PyEval_SaveThread() : NULL;
      code = call.run(is_long ? &scanlib_ask : &scanlib_signals);
      if (state) PyEval_RestoreThread(state);
      if (code != SCANLIB_FULL) return code;
      is_long = true;
    } while (grow());
    return SCANLIB_INTERRUPTED; /* by the lack of memory */
  }

  /* Runs the loop. `given` are its inputs, `old` the results of an earlier call, or NULL. Returns 0,
   * or -1 with an exception; `outputs` are the results. */
  int run(PyObject *const *given, PyArrayObject **old) {
    if (!inputs || !call.table) {
      PyErr_NoMemory();
      return -1;
    }
    for (int64_t k = 0; k < program->n_inputs; k++) {
      inputs[k] = checked(given[k], program->inputs[k]);
      if (!inputs[k]) return -1;
      call.give(k, PyArray_DATA(inputs[k]), (int64_t *)PyArray_DIMS(inputs[k]),
                (int64_t *)PyArray_STRIDES(inputs[k]));
    }
    int64_t code = call.prepare();
    if (code) {
      call.raise(code);
      return -1;
    }
    bool is_long = call.table[program->steps] >= MANY_STEPS;
    for (int64_t k = 0; k < program->n_outputs; k++) {
      if (old && fits(old[k], program->outputs[k], (npy_intp *)call.dims(k))) {
        outputs[k] = old[k];
        Py_INCREF(old[k]);
      } else {
        outputs[k] = fresh(k);
        if (!outputs[k]) return -1;
      }
      is_long = is_long || PyArray_NBYTES(outputs[k]) >= MANY_BYTES;
      call.use(k, PyArray_DATA(outputs[k]));
    }
    if (!call.start()) {
      PyErr_NoMemory();
      return -1;
    }
    code = steps_of(is_long);
    if (code) {
      call.raise(code);
      return -1;
    }
    return cut() ? 0 : -1;
  }
};

/* What Python calls: from values to an array, or to a tuple of several. */
static const char *const PROGRAM = "scanlib.program";

static PyObject *call_program(PyObject *capsule, PyObject *const *values, Py_ssize_t count) {
  const scanlib_program *program = (const scanlib_program *)PyCapsule_GetPointer(capsule, PROGRAM);
  Arrays arrays(program);
  if (count != program->n_inputs) {
    PyErr_SetString(PyExc_TypeError, "a loop is given another number of inputs than it has");
    return NULL;
  }
  if (arrays.run(values, NULL)) return NULL;
  if (program->n_outputs == 1) {
    PyObject *result = (PyObject *)arrays.outputs[0];
    arrays.outputs[0] = NULL;
    return result;
  }
  PyObject *results = PyTuple_New(program->n_outputs);
  for (int64_t k = 0; results && k < program->n_outputs; k++) {
    PyTuple_SET_ITEM(results, k, (PyObject *)arrays.outputs[k]);
    arrays.outputs[k] = NULL;
  }
  return results;
}

static PyMethodDef CALL = {"loop", (PyCFunction)(void (*)(void))call_program, METH_FASTCALL, NULL};

extern "C" PyObject *scanlib_function(const scanlib_program *program) {
  PyObject *capsule = PyCapsule_New((void *)program, PROGRAM, NULL);
  PyObject *function = capsule ? PyCFunction_NewEx(&CALL, capsule, NULL) : NULL;
  Py_XDECREF(capsule);
  return function;
}

/* A thunk. PyTensor's virtual machine finds the list for errors where the memory begins. */
struct Thunk {
  PyObject *error; /* type, value, trace */
  const scanlib_program *program;
  PyObject *storages; /* a tuple of lists of one item: of the inputs, then of the outputs */
  PyObject *numbers;  /* bytes: of each output, whether PyTensor's C code reads a number there */
};

static int run_thunk(Thunk *self) {
  const scanlib_program *program = self->program;
  const int64_t n = program->n_inputs, m = program->n_outputs;
  PyObject **cells = ((PyTupleObject *)self->storages)->ob_item;
  Arrays arrays(program);
  std::vector<PyObject *> values(n + m);
  for (int64_t k = 0; k < n + m; k++) {
    values[k] = PyList_GET_ITEM(cells[k], 0);
    if (k >= n && !PyArray_Check(values[k])) values[k] = NULL;
  }
  if (arrays.run(values.data(), (PyArrayObject **)values.data() + n)) return -1;
  const char *is_number = PyBytes_AS_STRING(self->numbers);
  for (int64_t k = 0; k < m; k++) {
    PyObject *result = (PyObject *)arrays.outputs[k];
    arrays.outputs[k] = NULL;
    if (is_number[k] && !(result = PyArray_Return((PyArrayObject *)result))) return -1;
    PyList_SetItem(cells[n + k], 0, result);
  }
  return 0;
}

/* Returns 1 where there is an error, which is put into the list. */
static int execute(Thunk *self) {
  if (!run_thunk(self)) return 0;
  PyObject *found[3];
  PyErr_Fetch(found, found + 1, found + 2);
  for (int k = 0; k < 3; k++) {
    if (!found[k]) {
      Py_INCREF(Py_None);
      found[k] = Py_None;
    }
    PyList_SetItem(self->error, k, found[k]);
  }
  return 1;
}

static void destroy(PyObject *capsule) {
  Thunk *self = (Thunk *)PyCapsule_GetContext(capsule);
  Py_DECREF(self->error);
  Py_DECREF(self->storages);
  Py_DECREF(self->numbers);
  free(self);
}

/* Returns a capsule as PyTensor's virtual machine expects it: a function, and what it is given. */
extern "C" PyObject *scanlib_thunk(const scanlib_program *program, PyObject *error,
                                   PyObject *storages, PyObject *numbers) {
  Thunk *self = (Thunk *)malloc(sizeof *self);
  if (!self) return PyErr_NoMemory();
  PyObject *capsule = PyCapsule_New((void *)&execute, NULL, &destroy);
  if (!capsule || PyCapsule_SetContext(capsule, self)) {
    free(self);
    return NULL;
  }
  Py_INCREF(error);
  Py_INCREF(storages);
  Py_INCREF(numbers);
  self->error = error;
  self->program = program;
  self->storages = storages;
  self->numbers = numbers;
  return capsule;
}

/* Runs a thunk for Python: its exception is raised. */
extern "C" int scanlib_run_thunk(PyObject *capsule) {
  return run_thunk((Thunk *)PyCapsule_GetContext(capsule));
}

#include "compiled.h"
