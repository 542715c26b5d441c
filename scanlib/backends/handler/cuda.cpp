/* What XLA calls for a loop on a CUDA device: it launches the loop's kernels.
 *
 * One handler serves all loops. The attributes of a call say which loop, and hold all numbers of its
 * kernels but the addresses; see `scanlib/backends/cuda/launch.py`. The kernels' handles come from
 * Python at the first call in a context. No lock of Python's is taken afterwards.
 */
#include <cstdio>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "xla.h"

typedef int (*scanlib_find)(const char *loop, void *context, void **kernels, int count, char *text,
                            int size);

struct scanlib_driver {
  int (*context_of)(void *, void **);
  int (*push)(void *);
  int (*pop)(void **);
  int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                void **, void **);
};

static scanlib_driver driver;
static scanlib_find find_kernels;
static int any_stream; /* where there is no stream, as on the CPU, take the default one */
static std::mutex guard;
static std::map<std::pair<std::string, void *>, std::vector<void *> > loaded;

extern "C" int scanlib_connect(const char *library, scanlib_find find, int without_streams) {
  void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) return 1;
  *(void **)&driver.context_of = dlsym(handle, "cuStreamGetCtx");
  *(void **)&driver.push = dlsym(handle, "cuCtxPushCurrent_v2");
  *(void **)&driver.pop = dlsym(handle, "cuCtxPopCurrent_v2");
  *(void **)&driver.launch = dlsym(handle, "cuLaunchKernel");
  find_kernels = find;
  any_stream = without_streams;
  return driver.context_of && driver.push && driver.pop && driver.launch ? 0 : 1;
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

/* The kernels of a loop in a context. Python is asked without a lock: it may be waiting for one. */
static int kernels_of(const std::string &loop, void *context, int count,
                      std::vector<void *> *kernels, char *text, int size) {
  const std::pair<std::string, void *> key(loop, context);
  {
    std::lock_guard<std::mutex> lock(guard);
    auto found = loaded.find(key);
    if (found != loaded.end()) {
      *kernels = found->second;
      return 0;
    }
  }
  kernels->resize(count);
  if (find_kernels(loop.c_str(), context, kernels->data(), count, text, size)) return 1;
  std::lock_guard<std::mutex> lock(guard);
  loaded[key] = *kernels;
  return 0;
}

static int64_t address(void *buffer) { return (int64_t)((XLA_FFI_Buffer *)buffer)->data; }

extern "C" XLA_FFI_Error *scanlib_handler(XLA_FFI_CallFrame *frame) {
  if (is_question(frame)) return NULL;
  char text[2048] = "";
  if (!find_kernels) return failed(frame, "scanlib: there is no CUDA driver");
  const XLA_FFI_ByteSpan *name = (const XLA_FFI_ByteSpan *)attribute(frame, "loop");
  std::vector<int64_t> words = numbers(frame, "words");
  const std::vector<int64_t> slots = numbers(frame, "slots"), calls = numbers(frame, "launches");
  const std::vector<int64_t> count = numbers(frame, "count");
  const size_t given = frame->args.size, made = frame->rets.size;
  if (!name || count.size() != 1 || given + made != slots.size())
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
  int status = kernels_of(loop, context, (int)count[0], &kernels, text, sizeof text);
  void *arguments[1] = {words.data()};
  for (size_t k = 0; !status && k + 3 <= calls.size(); k += 3) {
    status = driver.launch(kernels[calls[k]], (unsigned)calls[k + 1], 1, 1, (unsigned)calls[k + 2],
                           1, 1, 0, stream, arguments, NULL);
    if (status) snprintf(text, sizeof text, "scanlib: a launch failed with status %d", status);
  }
  driver.pop(&context);
  return status ? failed(frame, text) : NULL;
}
