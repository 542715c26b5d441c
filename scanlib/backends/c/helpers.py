"""C functions that all loops share: exceptions, memory, copies."""

HELPERS = r"""
#ifndef SCANLIB_HELPERS
#define SCANLIB_HELPERS
/* Sets an exception of scanlib.ops.errors; returns -1. */
static int scanlib_raise(const char *kind, const char *text, int count, npy_intp a, npy_intp b) {
  PyObject *module = PyImport_ImportModule("scanlib.ops.errors");
  PyObject *type = module ? PyObject_GetAttrString(module, kind) : NULL;
  PyObject *error = NULL, *message = NULL;
  if (type)
    error = count == 0   ? PyObject_CallFunction(type, "s", text)
            : count == 1 ? PyObject_CallFunction(type, "sn", text, (Py_ssize_t)a)
                         : PyObject_CallFunction(type, "snn", text, (Py_ssize_t)a, (Py_ssize_t)b);
  /* The text with its numbers: PyTensor adds to texts, and would lose the numbers. */
  if (error) message = PyObject_Str(error);
  if (message) PyErr_SetObject(type, message);
  Py_XDECREF(message);
  Py_XDECREF(error);
  Py_XDECREF(type);
  Py_XDECREF(module);
  return -1;
}

/* One half, of which compilers do not know. */
template <class T> static inline T scanlib_half() {
  volatile T half = (T)0.5;
  return half;
}

static int scanlib_shapes_differ() {
  PyErr_SetString(PyExc_ValueError, "Incompatible Elemwise input shapes inside a scan");
  return -1;
}

/* Fresh memory, or that of an earlier call where it fits. Returns 0, or -1 without memory. */
static int scanlib_output(PyArrayObject **place, int ndim, npy_intp *dims, int type) {
  PyArrayObject *old = *place;
  if (old && PyArray_NDIM(old) == ndim && PyArray_TYPE(old) == type &&
      PyArray_CHKFLAGS(old, NPY_ARRAY_CARRAY | NPY_ARRAY_OWNDATA) &&
      PyArray_CompareLists(PyArray_DIMS(old), dims, ndim))
    return 0;
  PyArrayObject *fresh = (PyArrayObject *)PyArray_EMPTY(ndim, dims, type, 0);
  if (!fresh) return -1;
  *place = fresh;
  Py_XDECREF(old);
  return 0;
}

/* Copies an array of any strides to contiguous memory; returns the end of what was written. */
static char *scanlib_copy(char *target, const char *source, int ndim, const npy_intp *dims,
                          const npy_intp *strides, size_t size) {
  if (ndim == 0) {
    memcpy(target, source, size);
    return target + size;
  }
  for (npy_intp i = 0; i < dims[0]; i++)
    target = scanlib_copy(target, source + i * strides[0], ndim - 1, dims + 1, strides + 1, size);
  return target;
}

/* Replaces an array by a longer one with the same first rows. */
static int scanlib_grow(PyArrayObject **place, npy_intp rows, npy_intp used) {
  PyArrayObject *old = *place;
  npy_intp dims[NPY_MAXDIMS];
  memcpy(dims, PyArray_DIMS(old), PyArray_NDIM(old) * sizeof(npy_intp));
  const npy_intp before = dims[0];
  dims[0] = rows;
  PyArrayObject *fresh =
      (PyArrayObject *)PyArray_EMPTY(PyArray_NDIM(old), dims, PyArray_TYPE(old), 0);
  if (!fresh) return -1;
  if (before) memcpy(PyArray_DATA(fresh), PyArray_DATA(old), PyArray_NBYTES(old) / before * used);
  *place = fresh;
  Py_DECREF(old);
  return 0;
}

/* Replaces an array by a view of some of its rows. */
static int scanlib_rows(PyArrayObject **place, npy_intp first, npy_intp end) {
  PyObject *view = PySequence_GetSlice((PyObject *)*place, first, end);
  if (!view) return -1;
  Py_DECREF(*place);
  *place = (PyArrayObject *)view;
  return 0;
}

/* Memory that goes with the block it is declared in. */
struct scanlib_memory {
  char *data;
  scanlib_memory() : data(NULL) {}
  ~scanlib_memory() { free(data); }
  int get(size_t bytes) {
    data = (char *)malloc(bytes ? bytes : 1);
    if (!data) PyErr_NoMemory();
    return data ? 0 : -1;
  }
};
#endif
"""

THREADS = r"""
#ifndef SCANLIB_THREADS
#define SCANLIB_THREADS
#include <system_error>
#include <thread>
#include <vector>
/* Calls walk(0) ... walk(slices - 1), each in a thread of its own where there can be one. */
template <class Walk> static void scanlib_in_threads(npy_intp slices, const Walk &walk) {
  std::vector<std::thread> threads;
  npy_intp k = 1;
  try {
    threads.reserve(slices);
    for (; k < slices; k++) threads.emplace_back(walk, k);
  } catch (const std::exception &) {
  }
  walk(0);
  for (; k < slices; k++) walk(k);
  for (std::thread &thread : threads) thread.join();
}
#endif
"""
