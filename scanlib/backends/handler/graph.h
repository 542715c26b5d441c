/* A graph as instructions, which one call runs: programs of kernels, views of arrays, and functions
 * of Python. `scanlib/backends/handler/instructions.py` makes them.
 *
 * Values are in registers: constants first, then the inputs. Each call has registers of its own.
 */
#include <vector>

enum Kind { RUN, CALL, SUBTENSOR, SHUFFLE, SIZE, CHECK, ROWS };
enum End { NO_END, NUMBER, REGISTER }; /* of a slice */

struct Instruction {
  int64_t kind;
  const scanlib_program *program;
  PyObject *function;
  std::vector<int64_t> inputs, outputs, numbers, done; /* registers that nobody reads any more */
};

struct Graph {
  std::vector<Instruction> code;
  std::vector<int64_t> results;
  int64_t count; /* of registers */
  PyObject *constants, *inputs, *outputs, *where;
};

static const char *const GRAPH = "scanlib.graph";

static PyArrayObject *as_array(PyObject *value) {
  return (PyArrayObject *)PyArray_FROM_O(value);
}

static PyObject *view_of(PyArrayObject *array, int ndim, const npy_intp *dims,
                         const npy_intp *strides, const char *data) {
  PyArray_Descr *kind = PyArray_DESCR(array);
  Py_INCREF(kind);
  PyObject *view = PyArray_NewFromDescr(&PyArray_Type, kind, ndim, dims, strides, (void *)data,
                                        PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE, NULL);
  if (!view) return NULL;
  Py_INCREF(array);
  if (PyArray_SetBaseObject((PyArrayObject *)view, (PyObject *)array)) {
    Py_DECREF(view);
    return NULL;
  }
  return view;
}

/* Reads the end of a slice, or an index; `value` stays what it is where there is none. */
static bool read_end(const int64_t *end, PyObject **registers, Py_ssize_t *value) {
  if (end[0] == NUMBER) *value = (Py_ssize_t)end[1];
  if (end[0] != REGISTER) return true;
  PyObject *given = registers[end[1]];
  if (PyArray_Check(given) && PyArray_TYPE((PyArrayObject *)given) == NPY_INT64 &&
      PyArray_NDIM((PyArrayObject *)given) == 0 && PyArray_ISBEHAVED_RO((PyArrayObject *)given)) {
    *value = *(npy_int64 *)PyArray_DATA((PyArrayObject *)given);
    return true;
  }
  *value = PyNumber_AsSsize_t(given, NULL);
  return *value != -1 || !PyErr_Occurred();
}

/* Basic indices: each is seven numbers, whether it is a slice, and its ends, or the index itself. */
static PyObject *subtensor(const Instruction &own, PyObject **registers) {
  PyArrayObject *array = as_array(registers[own.inputs[0]]);
  if (!array) return NULL;
  npy_intp dims[NPY_MAXDIMS], strides[NPY_MAXDIMS];
  char *data = (char *)PyArray_DATA(array);
  int ndim = 0, axis = 0;
  bool fine = true;
  for (size_t k = 0; fine && k < own.numbers.size(); k += 7, axis++) {
    const int64_t *index = &own.numbers[k];
    const npy_intp size = PyArray_DIM(array, axis), stride = PyArray_STRIDE(array, axis);
    Py_ssize_t start = 0, stop = 0, step = 1;
    if (!index[0]) {
      fine = read_end(index + 1, registers, &start);
      if (fine && start < 0) start += size;
      if (fine && (start < 0 || start >= size)) {
        PyErr_SetString(PyExc_IndexError, "index out of bounds");
        fine = false;
      }
      data += start * stride;
      continue;
    }
    fine = read_end(index + 5, registers, &step);
    if (fine && step == 0) {
      PyErr_SetString(PyExc_ValueError, "slice step cannot be zero");
      fine = false;
    }
    start = step < 0 ? PY_SSIZE_T_MAX : 0;
    stop = step < 0 ? PY_SSIZE_T_MIN : PY_SSIZE_T_MAX;
    fine = fine && read_end(index + 1, registers, &start) && read_end(index + 3, registers, &stop);
    if (!fine) break;
    dims[ndim] = PySlice_AdjustIndices(size, &start, &stop, step);
    strides[ndim++] = stride * step;
    if (dims[ndim - 1]) data += start * stride;
  }
  for (; axis < PyArray_NDIM(array); axis++) {
    dims[ndim] = PyArray_DIM(array, axis);
    strides[ndim++] = PyArray_STRIDE(array, axis);
  }
  PyObject *result = NULL;
  if (fine && ndim) {
    result = view_of(array, ndim, dims, strides, data);
  } else if (fine) { /* one number does not keep a whole array */
    result = PyArray_EMPTY(0, dims, PyArray_TYPE(array), 0);
    if (result) memcpy(PyArray_DATA((PyArrayObject *)result), data, PyArray_ITEMSIZE(array));
  }
  Py_DECREF(array);
  return result;
}

/* The axes of an array in another order, -1 for a new one. */
static PyObject *shuffle(const Instruction &own, PyObject **registers) {
  PyArrayObject *array = as_array(registers[own.inputs[0]]);
  if (!array) return NULL;
  npy_intp dims[NPY_MAXDIMS], strides[NPY_MAXDIMS], items = 1;
  const int ndim = (int)own.numbers.size();
  for (int k = 0; k < ndim; k++) {
    const int axis = (int)own.numbers[k];
    dims[k] = axis < 0 ? 1 : PyArray_DIM(array, axis);
    strides[k] = axis < 0 ? 0 : PyArray_STRIDE(array, axis);
    items *= dims[k];
  }
  PyObject *result = NULL;
  if (items == PyArray_SIZE(array))
    result = view_of(array, ndim, dims, strides, (char *)PyArray_DATA(array));
  else
    PyErr_SetString(PyExc_ValueError, "an axis that is dropped does not have length one");
  Py_DECREF(array);
  return result;
}

static PyObject *size_of(const Instruction &own, PyObject **registers) {
  PyArrayObject *array = as_array(registers[own.inputs[0]]);
  npy_intp none[1];
  PyObject *result = array ? PyArray_EMPTY(0, none, NPY_INT64, 0) : NULL;
  if (result)
    *(npy_int64 *)PyArray_DATA((PyArrayObject *)result) = PyArray_DIM(array, (int)own.numbers[0]);
  Py_XDECREF(array);
  return result;
}

/* The first value, if all others are true; else the function raises. */
static PyObject *check(const Instruction &own, PyObject **registers) {
  for (size_t k = 1; k < own.inputs.size(); k++) {
    const int holds = PyObject_IsTrue(registers[own.inputs[k]]);
    if (holds < 0) return NULL;
    if (!holds) {
      Py_XDECREF(PyObject_CallObject(own.function, NULL));
      return NULL;
    }
  }
  PyObject *value = registers[own.inputs[0]];
  Py_INCREF(value);
  return value;
}

/* An array that has as many rows as a number says; else what the function makes of both. */
static PyObject *rows(const Instruction &own, PyObject **registers) {
  PyObject *value = registers[own.inputs[0]];
  const int64_t end[] = {REGISTER, own.inputs[1]};
  Py_ssize_t wanted = -1;
  if (!read_end(end, registers, &wanted)) return NULL;
  if (PyArray_Check(value) && PyArray_DIM((PyArrayObject *)value, 0) == wanted) {
    Py_INCREF(value);
    return value;
  }
  PyObject *given[] = {value, registers[own.inputs[1]]};
  return PyObject_Vectorcall(own.function, given, 2, NULL);
}

static bool run_program(const Instruction &own, PyObject **registers) {
  std::vector<PyObject *> given(own.inputs.size());
  for (size_t k = 0; k < given.size(); k++) given[k] = registers[own.inputs[k]];
  Arrays arrays(own.program);
  if (arrays.run(given.data(), NULL)) return false;
  for (size_t k = 0; k < own.outputs.size(); k++) {
    registers[own.outputs[k]] = (PyObject *)arrays.outputs[k];
    arrays.outputs[k] = NULL;
  }
  return true;
}

static bool call_function(const Instruction &own, PyObject **registers) {
  std::vector<PyObject *> given(own.inputs.size());
  for (size_t k = 0; k < given.size(); k++) given[k] = registers[own.inputs[k]];
  PyObject *made = PyObject_Vectorcall(own.function, given.data(), given.size(), NULL);
  if (!made) return false;
  if (own.outputs.size() == 1) {
    registers[own.outputs[0]] = made;
    return true;
  }
  PyObject *several = PySequence_Fast(made, "a node has several results");
  Py_DECREF(made);
  if (!several) return false;
  const size_t count = PySequence_Fast_GET_SIZE(several);
  if (count != own.outputs.size())
    PyErr_SetString(PyExc_ValueError, "a node has another number of results");
  for (size_t k = 0; count == own.outputs.size() && k < count; k++) {
    PyObject *value = PySequence_Fast_GET_ITEM(several, k);
    Py_INCREF(value);
    registers[own.outputs[k]] = value;
  }
  Py_DECREF(several);
  return count == own.outputs.size();
}

static bool run_one(const Instruction &own, PyObject **registers) {
  if (own.kind == RUN) return run_program(own, registers);
  if (own.kind == CALL) return call_function(own, registers);
  PyObject *result = NULL;
  switch (own.kind) {
    case SUBTENSOR: result = subtensor(own, registers); break;
    case SHUFFLE: result = shuffle(own, registers); break;
    case SIZE: result = size_of(own, registers); break;
    case CHECK: result = check(own, registers); break;
    case ROWS: result = rows(own, registers); break;
  }
  registers[own.outputs[0]] = result;
  return result != NULL;
}

/* Runs everything, from new references to the inputs, which are taken, to those of the results. */
static bool run_all(const Graph *graph, std::vector<PyObject *> &registers) {
  for (size_t k = 0; k < graph->code.size(); k++) {
    const Instruction &own = graph->code[k];
    if (!run_one(own, registers.data())) {
      PyObject *type, *value, *trace;
      PyErr_Fetch(&type, &value, &trace);
      PyList_SetItem(graph->where, 0, PyLong_FromSsize_t((Py_ssize_t)k));
      PyErr_Restore(type, value, trace);
      return false;
    }
    for (size_t j = 0; j < own.done.size(); j++) Py_CLEAR(registers[own.done[j]]);
  }
  return true;
}

static PyObject *run_graph(const Graph *graph, PyObject *const *given, bool stored) {
  std::vector<PyObject *> registers(graph->count, NULL);
  const Py_ssize_t known = PyTuple_GET_SIZE(graph->constants);
  const Py_ssize_t n = PyTuple_GET_SIZE(graph->inputs);
  for (Py_ssize_t k = 0; k < known + n; k++) {
    PyObject *value = k < known ? PyTuple_GET_ITEM(graph->constants, k) : given[k - known];
    Py_INCREF(value);
    registers[k] = value;
  }
  PyObject *results = NULL;
  if (run_all(graph, registers)) {
    const size_t m = graph->results.size();
    results = PyList_New(m);
    for (size_t k = 0; results && k < m; k++) {
      PyObject *value = registers[graph->results[k]];
      Py_INCREF(value);
      PyList_SET_ITEM(results, k, value);
      if (!stored) continue;
      Py_INCREF(value);
      PyList_SetItem(PyTuple_GET_ITEM(graph->outputs, k), 0, value);
    }
  }
  for (size_t k = 0; k < registers.size(); k++) Py_XDECREF(registers[k]);
  return results;
}

/* What a compiled function calls: values are in lists of one item. */
static PyObject *run_stored(PyObject *capsule, PyObject *) {
  const Graph *graph = (const Graph *)PyCapsule_GetPointer(capsule, GRAPH);
  const Py_ssize_t n = PyTuple_GET_SIZE(graph->inputs);
  std::vector<PyObject *> given(n);
  for (Py_ssize_t k = 0; k < n; k++)
    given[k] = PyList_GET_ITEM(PyTuple_GET_ITEM(graph->inputs, k), 0);
  return run_graph(graph, given.data(), true);
}

static PyObject *run_values(PyObject *capsule, PyObject *values) {
  const Graph *graph = (const Graph *)PyCapsule_GetPointer(capsule, GRAPH);
  const Py_ssize_t n = PyTuple_GET_SIZE(graph->inputs);
  if (PyTuple_GET_SIZE(values) != n)
    return PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", n,
                        PyTuple_GET_SIZE(values));
  return run_graph(graph, ((PyTupleObject *)values)->ob_item, false);
}

static PyMethodDef STORED = {"run_stored", run_stored, METH_NOARGS, NULL};
static PyMethodDef VALUES = {"run_values", run_values, METH_VARARGS, NULL};

static void forget(Graph *graph) {
  for (size_t k = 0; k < graph->code.size(); k++) Py_DECREF(graph->code[k].function);
  Py_XDECREF(graph->constants);
  Py_XDECREF(graph->inputs);
  Py_XDECREF(graph->outputs);
  Py_XDECREF(graph->where);
  delete graph;
}

static void forget_capsule(PyObject *capsule) {
  forget((Graph *)PyCapsule_GetPointer(capsule, GRAPH));
}

static std::vector<int64_t> numbers_of(PyObject *tuple) {
  std::vector<int64_t> found(PyTuple_GET_SIZE(tuple));
  for (size_t k = 0; k < found.size(); k++)
    found[k] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, k));
  return found;
}

/* Returns two functions: of the values in lists, and of values. An instruction is a tuple of its
 * kind, a program's address, a function, and tuples of inputs, outputs, numbers and what is done. */
extern "C" PyObject *scanlib_graph(PyObject *code, PyObject *constants, PyObject *results,
                                   PyObject *inputs, PyObject *outputs, PyObject *where) {
  Graph *graph = new Graph();
  graph->results = numbers_of(results);
  graph->constants = constants, graph->inputs = inputs, graph->outputs = outputs;
  graph->where = where;
  Py_INCREF(constants), Py_INCREF(inputs), Py_INCREF(outputs), Py_INCREF(where);
  graph->count = PyTuple_GET_SIZE(constants) + PyTuple_GET_SIZE(inputs);
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(code); k++) {
    PyObject *parts = PyTuple_GET_ITEM(code, k);
    Instruction own;
    own.kind = PyLong_AsLongLong(PyTuple_GET_ITEM(parts, 0));
    own.program = (const scanlib_program *)PyLong_AsVoidPtr(PyTuple_GET_ITEM(parts, 1));
    own.function = PyTuple_GET_ITEM(parts, 2);
    Py_INCREF(own.function);
    own.inputs = numbers_of(PyTuple_GET_ITEM(parts, 3));
    own.outputs = numbers_of(PyTuple_GET_ITEM(parts, 4));
    own.numbers = numbers_of(PyTuple_GET_ITEM(parts, 5));
    own.done = numbers_of(PyTuple_GET_ITEM(parts, 6));
    for (size_t j = 0; j < own.outputs.size(); j++)
      if (own.outputs[j] >= graph->count) graph->count = own.outputs[j] + 1;
    graph->code.push_back(own);
  }
  PyObject *capsule = PyErr_Occurred() ? NULL : PyCapsule_New(graph, GRAPH, &forget_capsule);
  if (!capsule) {
    forget(graph);
    return NULL;
  }
  PyObject *stored = PyCFunction_NewEx(&STORED, capsule, NULL);
  PyObject *values = PyCFunction_NewEx(&VALUES, capsule, NULL);
  Py_DECREF(capsule);
  PyObject *both = stored && values ? PyTuple_Pack(2, stored, values) : NULL;
  Py_XDECREF(stored);
  Py_XDECREF(values);
  return both;
}
