/* Stand-ins for the NVIDIA driver's libraries, for a machine without a GPU. Every call succeeds and does nothing; the
 * management library reports eight H100s. tools/build_cuda_venv.sh compiles this file twice: as libcuda.so.1, and with
 * -DNVML as libnvidia-ml.so.1.
 */
#ifdef NVML
#include <stdio.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } memory_t;

#define DOES_NOTHING(name) int name() { return 0; }
DOES_NOTHING(nvmlInit_v2)
DOES_NOTHING(nvmlInitWithFlags)
DOES_NOTHING(nvmlShutdown)

int nvmlDeviceGetCount_v2(unsigned *count) { *count = 8; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(index + 1UL); return 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned size) { snprintf(name, size, "NVIDIA H100 80GB HBM3"); return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-00000000-0000-0000-0000-%012lx", (unsigned long)device);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    memory->total = 80ULL << 30, memory->free = 79ULL << 30, memory->used = 1ULL << 30;
    return 0;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, int what, int *status) { *status = 0; return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) { snprintf(version, size, "580.65"); return 0; }
const char *nvmlErrorString(int code) { return "no error"; }
#else
/* What the CUDA builds of vLLM, Triton and Transformer Engine link against. */
#define DOES_NOTHING(name) int name() { return 0; }
DOES_NOTHING(cuCtxGetCurrent)
DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuDeviceGetAttribute)
DOES_NOTHING(cuDevicePrimaryCtxRetain)
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuGetErrorName)
DOES_NOTHING(cuGetErrorString)
DOES_NOTHING(cuGetProcAddress_v2)
DOES_NOTHING(cuInit)
DOES_NOTHING(cuLaunchKernel)
DOES_NOTHING(cuLaunchKernelEx)
DOES_NOTHING(cuMemAddressFree)
DOES_NOTHING(cuMemAddressReserve)
DOES_NOTHING(cuMemCreate)
DOES_NOTHING(cuMemGetAllocationGranularity)
DOES_NOTHING(cuMemMap)
DOES_NOTHING(cuMemRelease)
DOES_NOTHING(cuMemSetAccess)
DOES_NOTHING(cuMemUnmap)
DOES_NOTHING(cuModuleGetFunction)
DOES_NOTHING(cuModuleLoadDataEx)
DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuPointerGetAttribute)
DOES_NOTHING(cuTensorMapEncodeTiled)
#endif
