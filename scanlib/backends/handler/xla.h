/* What all handlers ask of XLA's foreign function interface, and answer it. */
#include <string.h>

#include "xla/ffi/api/c_api.h"

/* XLA asks first which version of its interface this code was compiled for. */
static bool is_question(XLA_FFI_CallFrame *frame) {
  auto *extension = frame->extension_start; /* its type has had several names */
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return true;
}

static const void *attribute(XLA_FFI_CallFrame *frame, const char *name) {
  for (int64_t k = 0; k < frame->attrs.size; k++) {
    const XLA_FFI_ByteSpan *own = frame->attrs.names[k];
    if (own->len == strlen(name) && !memcmp(own->ptr, name, own->len)) return frame->attrs.attrs[k];
  }
  return NULL;
}

static XLA_FFI_Error *failed(XLA_FFI_CallFrame *frame, const char *text) {
  XLA_FFI_Error_Create_Args args;
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.extension_start = NULL;
  args.message = text;
  args.errc = XLA_FFI_Error_Code_INTERNAL;
  return frame->api->XLA_FFI_Error_Create(&args);
}
