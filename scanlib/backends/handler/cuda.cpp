/* What XLA calls for a loop on a CUDA device: it launches the loop's kernels.
 *
 * One handler serves all loops. The attributes of a call say which loop, and hold all numbers of its
 * kernels but the addresses; see `scanlib/backends/cuda/launch.py`. Python gives the kernels' code
 * before, which is loaded at the first call in a context; no lock of Python's is taken.
 */
#include <cstdio>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "xla.h"

struct scanlib_driver {
  int (*context_of)(void *, void **);
  int (*push)(void *);
  int (*pop)(void **);
  int (*load)(void **, const void *);
  int (*function)(void **, void *, const char *);
  int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                void **, void **);
};

enum { NOT_FOUND = 500 }; /* a status of the driver's */

static scanlib_driver driver;
static int any_stream; /* where there is no stream, as on the CPU, take the default one */
static std::mutex guard;
/* Code for each architecture, and the names of the kernels. */
static std::map<std::string, std::pair<std::set<std::string>, std::string> > codes;
static std::map<std::pair<std::string, void *>, std::vector<void *> > loaded;

extern "C" int scanlib_connect(const char *library, int without_streams) {
  void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) return 1;
  *(void **)&driver.context_of = dlsym(handle, "cuStreamGetCtx");
  *(void **)&driver.push = dlsym(handle, "cuCtxPushCurrent_v2");
  *(void **)&driver.pop = dlsym(handle, "cuCtxPopCurrent_v2");
  *(void **)&driver.load = dlsym(handle, "cuModuleLoadData");
  *(void **)&driver.function = dlsym(handle, "cuModuleGetFunction");
  *(void **)&driver.launch = dlsym(handle, "cuLaunchKernel");
  any_stream = without_streams;
  return 0;
}

/* Makes the kernels of a loop known: their code for one architecture (a call for each), and their
 * names with spaces between them. */
extern "C" void scanlib_keep(const char *loop, const char *code, size_t size, const char *names) {
  std::lock_guard<std::mutex> lock(guard);
  codes[loop].first.insert(std::string(code, size));
  codes[loop].second = names;
}

static std::vector<int64_t> numbers(XLA_FFI_CallFrame *frame, const char *name) {
  const XLA_FFI_Array *array = (const XLA_FFI_Array *)attribute(frame, name);
  if (!array || array->dtype != XLA_FFI_DataType_S64) return std::vector<int64_t>();
  const int64_t *first = (const int64_t *)array->data;
  return std::vector<int64_t>(first, first + array->size);
}

static bool stream_of(XLA_FFI_CallFrame *frame, void **stream) {
  XLA_FFI_Stream_Get_Args args;
  args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
  args.extension_start = NULL;
  args.ctx = frame->ctx;
  args.stream = NULL;
  XLA_FFI_Error *error = frame->api->XLA_FFI_Stream_Get(&args);
  *stream = args.stream;
  if (!error) return true;
  XLA_FFI_Error_Destroy_Args destroy;
  destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  destroy.extension_start = NULL;
  destroy.error = error;
  frame->api->XLA_FFI_Error_Destroy(&destroy);
  *stream = NULL;
  return any_stream;
}

/* The kernels of a loop in the current context; returns a status of the driver's. */
static int kernels_of(const std::string &loop, void *context, std::vector<void *> *kernels) {
  std::lock_guard<std::mutex> lock(guard);
  std::vector<void *> &found = loaded[std::make_pair(loop, context)];
  if (found.empty()) {
    void *module, *kernel;
    int status = NOT_FOUND; /* a driver refuses code for other architectures than the device's */
    for (const std::string &code : codes[loop].first)
      if (!(status = driver.load(&module, code.c_str()))) break;
    std::istringstream names(codes[loop].second);
    for (std::string name; !status && names >> name; found.push_back(kernel))
      status = driver.function(&kernel, module, name.c_str());
    if (status) {
      found.clear();
      return status;
    }
  }
  *kernels = found;
  return 0;
}

static int64_t address(void *buffer) { return (int64_t)((XLA_FFI_Buffer *)buffer)->data; }

extern "C" XLA_FFI_Error *scanlib_handler(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  char text[2048] = "";
  if (!driver.launch) return failed(frame, "scanlib: there is no CUDA driver");
  const XLA_FFI_ByteSpan *name = (const XLA_FFI_ByteSpan *)attribute(frame, "loop");
  std::vector<int64_t> words = numbers(frame, "words");
  const std::vector<int64_t> slots = numbers(frame, "slots"), calls = numbers(frame, "launches");
  const size_t given = frame->args.size, made = frame->rets.size;
  if (!name || given + made != slots.size())
    return failed(frame, "scanlib: a call of a loop has other attributes than it should");
  void *stream, *context;
  if (!stream_of(frame, &stream)) return failed(frame, "scanlib: a loop was given no stream");
  if (driver.context_of(stream, &context) || driver.push(context))
    return failed(frame, "scanlib: the stream's context cannot be used");
  size_t slot = 0;
  for (size_t k = 0; k < given; k++) words[slots[slot++]] += address(frame->args.args[k]);
  for (size_t k = 0; k < made; k++) words[slots[slot++]] += address(frame->rets.rets[k]);
  std::vector<void *> kernels;
  const std::string loop(name->ptr, name->len);
  int status = kernels_of(loop, context, &kernels);
  if (status) snprintf(text, sizeof text, "scanlib: a loop was not loaded, status %d", status);
  void *arguments[1] = {words.data()};
  for (size_t k = 0; !status && k + 3 <= calls.size(); k += 3) {
    status = driver.launch(kernels[calls[k]], (unsigned)calls[k + 1], 1, 1, (unsigned)calls[k + 2],
                           1, 1, 0, stream, arguments, NULL);
    if (status) snprintf(text, sizeof text, "scanlib: a launch failed with status %d", status);
  }
  driver.pop(&context);
  return status ? failed(frame, text) : NULL;
}
