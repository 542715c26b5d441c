/* Memory of large arrays that begins where a line of the cache does.
 *
 * NumPy's own begins sixteen bytes behind one, so that every vector of sixty-four bytes lies in two.
 */
enum { LARGE = 1 << 11 }; /* items */

struct Header { /* before the first line */
  void *whole;
  size_t size;
};

static void *line_malloc(void *, size_t size) {
  char *whole = (char *)malloc(size + 2 * SCANLIB_LINE);
  if (!whole) return NULL;
  const uintptr_t last = (uintptr_t)whole + 2 * SCANLIB_LINE - 1;
  char *start = (char *)(last & ~(uintptr_t)(SCANLIB_LINE - 1));
  Header *header = (Header *)start - 1;
  header->whole = whole;
  header->size = size;
  scanlib_ask_for_large_pages(start, size);
  return start;
}

static void line_free(void *, void *start, size_t) {
  if (start) free(((Header *)start - 1)->whole);
}

static void *line_calloc(void *, size_t count, size_t size) {
  void *start = line_malloc(NULL, count * size);
  if (start) memset(start, 0, count * size);
  return start;
}

static void *line_realloc(void *, void *old, size_t size) {
  void *start = line_malloc(NULL, size);
  if (!start || !old) return start;
  const size_t held = ((Header *)old - 1)->size;
  memcpy(start, old, held < size ? held : size);
  line_free(NULL, old, 0);
  return start;
}

static PyDataMem_Handler LINES = {
    "scanlib_lines", 1, {NULL, line_malloc, line_calloc, line_realloc, line_free}};

/* Returns a new array; its memory is NumPy's own if it is small. */
static PyObject *new_array(int ndim, npy_intp *dims, int type) {
  npy_intp items = 1;
  for (int k = 0; k < ndim && items < LARGE; k++) items *= dims[k] < LARGE ? dims[k] : LARGE;
  static PyObject *lines = PyCapsule_New(&LINES, "mem_handler", NULL);
  PyObject *before = items >= LARGE && lines ? PyDataMem_SetHandler(lines) : NULL;
  PyObject *array = PyArray_EMPTY(ndim, dims, type, 0);
  if (before) {
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    Py_XDECREF(PyDataMem_SetHandler(before));
    Py_DECREF(before);
    PyErr_Restore(kind, value, trace);
  }
  return array;
}
