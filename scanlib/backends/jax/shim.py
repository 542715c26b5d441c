"""What stands in for NumPy and Python where the C code of a loop is called by XLA.

`scanlib.backends.c` writes loops for PyTensor's C linker: they take NumPy arrays and set Python
exceptions. XLA calls them without Python, from any of its threads, on memory of its own. So here
`PyArrayObject` is a small struct that points to such memory, results are there before the loop
runs, and errors are texts.
"""

# What the numbers of the CUDA kernels' template need, which serve elementwise loops here.
COMPLEX = r"""
#define SCANLIB_METHOD inline
#define SCANLIB_DEVICE static inline
template <class T> struct scanlib_real;
template <class T> static T scanlib_fetch(const char *place) {
  T value;
  memcpy(&value, place, sizeof value);
  return value;
}
"""

SHIM = r"""
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <math.h>
#include <new>
#ifdef __linux__
#include <sys/mman.h>
#endif
#include "xla/ffi/api/c_api.h"

typedef ptrdiff_t npy_intp;
typedef unsigned char npy_bool;
typedef int8_t npy_int8;
typedef int16_t npy_int16;
typedef int32_t npy_int32;
typedef int64_t npy_int64;
typedef uint8_t npy_uint8;
typedef uint16_t npy_uint16;
typedef uint32_t npy_uint32;
typedef uint64_t npy_uint64;
typedef float npy_float32;
typedef double npy_float64;
typedef double npy_double;
typedef float npy_float;
#define NPY_NAN NAN
#define NPY_INFINITY INFINITY
#define NPY_INFINITYF ((float)INFINITY)
enum {
  NPY_BOOL, NPY_INT8, NPY_INT16, NPY_INT32, NPY_INT64, NPY_UINT8, NPY_UINT16, NPY_UINT32,
  NPY_UINT64, NPY_FLOAT32, NPY_FLOAT64, NPY_COMPLEX64, NPY_COMPLEX128
};
#define NPY_MAXDIMS 32

struct PyArrayObject {
  char *data;
  int ndim;
  npy_intp bytes;
  npy_intp dims[NPY_MAXDIMS];
  npy_intp strides[NPY_MAXDIMS];
};
#define PyArray_DATA(array) ((void *)(array)->data)
#define PyArray_NDIM(array) ((array)->ndim)
#define PyArray_DIMS(array) ((array)->dims)
#define PyArray_DIM(array, axis) ((array)->dims[axis])
#define PyArray_STRIDES(array) ((array)->strides)
#define PyArray_STRIDE(array, axis) ((array)->strides[axis])
#define PyArray_NBYTES(array) ((array)->bytes)
#define PyArray_IS_C_CONTIGUOUS(array) 1

static thread_local char scanlib_error[1024];
#define PyExc_IndexError "IndexError"
#define PyExc_ValueError "ValueError"
static void PyErr_SetString(const char *kind, const char *text) {
  snprintf(scanlib_error, sizeof scanlib_error, "%s: %s", kind, text);
}
static void PyErr_NoMemory() { PyErr_SetString("MemoryError", "no memory"); }

#define SCANLIB_HELPERS
/* A text has "{}" where its numbers belong. */
static int scanlib_raise(const char *kind, const char *text, int, npy_intp a, npy_intp b) {
  const npy_intp numbers[] = {a, b};
  size_t used = snprintf(scanlib_error, sizeof scanlib_error, "%s: ", kind);
  int next = 0;
  for (; *text && used + 24 < sizeof scanlib_error; text++)
    if (text[0] == '{' && text[1] == '}' && next < 2) {
      used += snprintf(scanlib_error + used, 24, "%td", numbers[next++]);
      text++;
    } else {
      scanlib_error[used++] = *text;
    }
  scanlib_error[used] = 0;
  return -1;
}

static int scanlib_shapes_differ() {
  PyErr_SetString(PyExc_ValueError, "Incompatible Elemwise input shapes inside a scan");
  return -1;
}

/* Results are there already; their sizes must be those that the loop would give them. */
static int scanlib_output(PyArrayObject **place, int ndim, npy_intp *dims, int) {
  PyArrayObject *array = *place;
  int same = array->ndim == ndim;
  for (int i = 0; same && i < ndim; i++) same = array->dims[i] == dims[i];
  if (!same) PyErr_SetString(PyExc_ValueError, "a result of a scan has an unexpected shape");
  return same ? 0 : -1;
}

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

/* An array of XLA's: always contiguous. */
static void scanlib_array(PyArrayObject *array, void *pointer, size_t item) {
  const XLA_FFI_Buffer *buffer = (const XLA_FFI_Buffer *)pointer;
  array->data = (char *)buffer->data;
  array->ndim = (int)buffer->rank;
  npy_intp stride = item;
  for (int i = array->ndim - 1; i >= 0; i--) {
    array->dims[i] = buffer->dims[i];
    array->strides[i] = stride;
    stride *= buffer->dims[i];
  }
  array->bytes = stride;
}

/* Some rows of an array: the first one, and how many. */
static void scanlib_window(PyArrayObject *array, const void *pointer, int number) {
  int64_t place[2];
  memcpy(place, (const char *)((const XLA_FFI_Buffer *)pointer)->data + 16 * number, 16);
  array->data += place[0] * array->strides[0];
  array->bytes = array->strides[0] * place[1];
  array->dims[0] = place[1];
}

/* A result as large as that is fresh memory: pages of 2 MB are quicker to get than many of 4 KB. */
static void scanlib_result(PyArrayObject *array, void *pointer, size_t item) {
  scanlib_array(array, pointer, item);
#ifdef __linux__
  if (array->bytes >= (1 << 22)) {
    const uintptr_t first = ((uintptr_t)array->data + 4095) & ~(uintptr_t)4095;
    madvise((void *)first, array->bytes - 4096, MADV_HUGEPAGE);
  }
#endif
}

/* XLA asks first which version of its interface this code was compiled for. */
static int scanlib_is_question(XLA_FFI_CallFrame *frame) {
  auto *extension = frame->extension_start; /* its type has had several names */
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}

static XLA_FFI_Error *scanlib_failed(XLA_FFI_CallFrame *frame) {
  XLA_FFI_Error_Create_Args args;
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.extension_start = NULL;
  args.message = scanlib_error;
  args.errc = XLA_FFI_Error_Code_INTERNAL;
  return frame->api->XLA_FFI_Error_Create(&args);
}
"""


def handler(
    name: str,
    function: str,
    inputs: list[int],
    outputs: list[int],
    windows: int = 0,
    first: int = 0,
) -> str:
    """Return the C code of an XLA handler that calls a loop.

    Parameters
    ----------
    name : str
        The name under which the handler can be found.
    function : str
        The function of the loop: it takes the inputs and the addresses of the outputs.
    inputs, outputs : list of int
        The sizes of the arrays' items, in bytes.
    windows : int
        Of how many inputs, from the `first` one on, some rows are read only. Which ones, says a
        further argument of the handler, an array of 64-bit integers: for each of them the first row
        and the number of rows.
    """
    lines = [
        f'extern "C" XLA_FFI_Error *{name}(XLA_FFI_CallFrame *frame) {{',
        "  if (scanlib_is_question(frame)) return NULL;",
        f"  PyArrayObject in[{max(len(inputs), 1)}], out[{len(outputs)}];",
        f"  PyArrayObject *results[{len(outputs)}];",
    ]
    for k, size in enumerate(inputs):
        lines.append(f"  scanlib_array(&in[{k}], frame->args.args[{k}], {size});")
    for k in range(windows):
        place = f"frame->args.args[{len(inputs)}]"
        lines.append(f"  scanlib_window(&in[{first + k}], {place}, {k});")
    for k, size in enumerate(outputs):
        lines.append(f"  scanlib_result(&out[{k}], frame->rets.rets[{k}], {size});")
        lines.append(f"  results[{k}] = &out[{k}];")
    arguments = [f"&in[{k}]" for k in range(len(inputs))]
    arguments += [f"&results[{k}]" for k in range(len(outputs))]
    lines.append(f"  if ({function}({', '.join(arguments)})) return scanlib_failed(frame);")
    return "\n".join([*lines, "  return NULL;", "}", ""])
