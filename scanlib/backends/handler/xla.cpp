/* Loops that XLA calls on the CPU, through its foreign function interface.
 *
 * One handler serves all loops. The attribute ``program`` of a call is the key of a loop in a table
 * of this process. XLA calls from any of its threads, without Python's lock. Arrays are contiguous,
 * and results are there before the loop runs. The attribute ``numbers`` has the number of steps,
 * which is no argument where it is an input of the loop, and for each sequence the first row that is
 * read and how many are. A loop that may stop has one result more, the number of steps that it took,
 * and writes results that are as long as it can get.
 */
#define PY_SSIZE_T_CLEAN
#include "program.h"
#include <map>
#include <mutex>
#include <string>
#include "xla.h"

/* Loops by their keys. Entries are added by Python, and stay. */
static std::map<std::string, const scanlib_program *> programs;
static std::mutex guard;
static unsigned long main_thread;

static const scanlib_program *find(const char *key, size_t length) {
  std::lock_guard<std::mutex> lock(guard);
  const auto found = programs.find(std::string(key, length));
  return found == programs.end() ? NULL : found->second;
}

extern "C" void scanlib_set_main_thread(unsigned long thread) { main_thread = thread; }

extern "C" void scanlib_register(const char *key, const scanlib_program *program) {
  std::lock_guard<std::mutex> lock(guard);
  programs[key] = program;
}

/* Returns the error of a kernel that ended with a code: the text is Python's. */
static XLA_FFI_Error *raised(XLA_FFI_CallFrame *frame, scanlib_call &call, int64_t code) {
  const PyGILState_STATE state = PyGILState_Ensure();
  call.raise(code);
  PyObject *kind, *value, *trace;
  PyErr_Fetch(&kind, &value, &trace);
  PyErr_NormalizeException(&kind, &value, &trace);
  PyObject *text = kind ? PyUnicode_FromFormat("%s: %S", ((PyTypeObject *)kind)->tp_name, value)
                        : NULL;
  const char *bytes = text ? PyUnicode_AsUTF8(text) : NULL;
  XLA_FFI_Error *error = failed(frame, bytes ? bytes : "a loop failed");
  /* An interruption is to be seen by the caller, whom XLA gives errors of its own. */
  if (kind && PyErr_GivenExceptionMatches(kind, PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
  PyErr_Clear();
  Py_XDECREF(text);
  Py_XDECREF(kind);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  PyGILState_Release(state);
  return error;
}

/* Signals are for the main thread, which is this one where XLA does not call from another. */
static int ask(void *frame) {
  return PyThread_get_thread_ident() == main_thread ? scanlib_ask(frame) : 0;
}

static const XLA_FFI_Buffer *result(XLA_FFI_CallFrame *frame, int64_t k) {
  return (const XLA_FFI_Buffer *)frame->rets.rets[k];
}

extern "C" XLA_FFI_Error *scanlib_program_handler(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  const XLA_FFI_ByteSpan *key = (const XLA_FFI_ByteSpan *)attribute(frame, "program");
  const scanlib_program *program = key ? find(key->ptr, key->len) : NULL;
  if (!program) return failed(frame, "scanlib: no such loop was compiled in this process");
  const XLA_FFI_Array *told = (const XLA_FFI_Array *)attribute(frame, "numbers");
  const int64_t first = program->n_inputs - frame->args.size;
  if (!told || told->dtype != XLA_FFI_DataType_S64 || first < 0 || first > 1 ||
      frame->rets.size != program->n_outputs + (program->may_stop ? 1 : 0))
    return failed(frame, "scanlib: a loop is called with other arrays than it has");
  scanlib_call call(program);
  if (!call.table) return failed(frame, "MemoryError: a loop");
  const int64_t *numbers = (const int64_t *)told->data, *end = numbers + told->size;
  if (first) call.give(0, numbers, NULL, NULL);
  for (int64_t k = first; k < program->n_inputs; k++) {
    const XLA_FFI_Buffer *buffer = (const XLA_FFI_Buffer *)frame->args.args[k - first];
    if (program->inputs[k].ndim && buffer->rank != program->inputs[k].ndim)
      return failed(frame, "scanlib: an array of a loop has another number of axes than it should");
    call.give(k, buffer->data, buffer->dims, NULL);
    const int64_t *window = numbers + 1 + 2 * (k - first);
    if (window >= end) continue;
    int64_t *words = call.table + program->inputs[k].word;
    words[0] += window[0] * words[1 + program->inputs[k].ndim];
    words[1] = window[1];
  }
  int64_t code = call.prepare();
  if (code) return raised(frame, call, code);
  call.table[program->capacity] = call.table[program->steps];
  for (int64_t k = 0; k < program->n_outputs; k++) {
    const scanlib_array &kind = program->outputs[k];
    const XLA_FFI_Buffer *buffer = result(frame, k);
    int64_t *dims = call.dims(k);
    if (kind.grows) dims[0] = call.table[program->steps] + kind.extra;
    int64_t bytes = kind.itemsize;
    bool same = buffer->rank == kind.ndim;
    for (int64_t i = 0; same && i < kind.ndim; i++) {
      same = buffer->dims[i] == dims[i];
      bytes *= dims[i];
    }
    if (!same) return failed(frame, "ValueError: a result of a scan has an unexpected shape");
    scanlib_ask_for_large_pages(buffer->data, bytes);
    call.use(k, buffer->data);
  }
  if (!call.start()) return failed(frame, "MemoryError: the workspace of a loop");
  code = call.run(&ask);
  if (code) return raised(frame, call, code);
  if (program->may_stop)
    memcpy(result(frame, program->n_outputs)->data, call.table + program->taken, sizeof(int64_t));
  return NULL;
}
