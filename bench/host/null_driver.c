// A CUDA driver on which every call succeeds and no kernel runs: the time of a step is then the host's part alone.
// It has the calls of Triton's driver.c, for an sm_90 with 132 multiprocessors, and counts launches and descriptors.
#include <cuda.h>
#include <string.h>

#define SUCCEED return CUDA_SUCCESS

static long launches, descriptors;

long null_driver_launches(void) { return launches; }
long null_driver_descriptors(void) { return descriptors; }

CUresult CUDAAPI cuInit(unsigned flags) { SUCCEED; }
CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) { *text = "null driver"; SUCCEED; }
CUresult CUDAAPI cuDriverGetVersion(int *version) { *version = 13000; SUCCEED; }

#undef cuDeviceGet
CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; SUCCEED; }

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 * 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    default: *value = 1;
  }
  SUCCEED;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; SUCCEED; }
CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) { SUCCEED; }
CUresult CUDAAPI cuCtxGetDevice(CUdevice *device) { *device = 0; SUCCEED; }
CUresult CUDAAPI cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 1 << 20; SUCCEED; }
CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value) { SUCCEED; }
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; SUCCEED; }

CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)1; SUCCEED; }
CUresult CUDAAPI cuModuleUnload(CUmodule module) { SUCCEED; }
CUresult CUDAAPI cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)1;
  SUCCEED;
}
CUresult CUDAAPI cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  SUCCEED;
}
CUresult CUDAAPI cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { SUCCEED; }
CUresult CUDAAPI cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { SUCCEED; }

CUresult CUDAAPI cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;  // a host pointer is taken for the device's own
  SUCCEED;
}
CUresult CUDAAPI cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **values,
                                        CUdeviceptr pointer) {
  SUCCEED;
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  SUCCEED;
}

CUresult CUDAAPI cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  SUCCEED;
}
CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  launches++;
  SUCCEED;
}

CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                        const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                        const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                        CUtensorMapFloatOOBfill fill) {
  memset(map, 0, sizeof *map);
  descriptors++;
  SUCCEED;
}
CUresult CUDAAPI cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                         const cuuint64_t *sizes, const cuuint64_t *strides, const int *lower,
                                         const int *upper, cuuint32_t channels, cuuint32_t pixels,
                                         const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                         CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                         CUtensorMapFloatOOBfill fill) {
  descriptors++;
  SUCCEED;
}
