// The errors of the runtime, with CUDA's numbers, names and texts.
#pragma once

#include <sstream>
#include <string>
#include <utility>

#define CUDA_CPU_ERRORS(ERROR)                                                                                        \
    ERROR(cudaSuccess, 0, "no error")                                                                                 \
    ERROR(cudaErrorInvalidValue, 1, "invalid argument")                                                               \
    ERROR(cudaErrorMemoryAllocation, 2, "out of memory")                                                              \
    ERROR(cudaErrorInitializationError, 3, "initialization error")                                                    \
    ERROR(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                                         \
    ERROR(cudaErrorInvalidPitchValue, 12, "invalid pitch argument")                                                   \
    ERROR(cudaErrorInvalidSymbol, 13, "invalid device symbol")                                                        \
    ERROR(cudaErrorInvalidDevicePointer, 17, "invalid device pointer")                                                \
    ERROR(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                                   \
    ERROR(cudaErrorInsufficientDriver, 35, "CUDA driver version is insufficient for CUDA runtime version")            \
    ERROR(cudaErrorInvalidDeviceFunction, 98, "invalid device function")                                              \
    ERROR(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                                               \
    ERROR(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                                      \
    ERROR(cudaErrorNoKernelImageForDevice, 209, "no kernel image is available for execution on the device")           \
    ERROR(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                                             \
    ERROR(cudaErrorIllegalState, 401, "the operation cannot be performed in the present state")                       \
    ERROR(cudaErrorNotReady, 600, "device not ready")                                                                 \
    ERROR(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")                                   \
    ERROR(cudaErrorLaunchOutOfResources, 701, "too many resources requested for launch")                              \
    ERROR(cudaErrorLaunchTimeout, 702, "the launch timed out and was terminated")                                     \
    ERROR(cudaErrorPeerAccessAlreadyEnabled, 704, "peer access is already enabled")                                   \
    ERROR(cudaErrorPeerAccessNotEnabled, 705, "peer access has not been enabled")                                     \
    ERROR(cudaErrorSetOnActiveProcess, 708, "cannot set while device is active in this process")                      \
    ERROR(cudaErrorAssert, 710, "device-side assert triggered")                                                       \
    ERROR(cudaErrorHostMemoryAlreadyRegistered, 712, "part or all of the requested memory range is already mapped")   \
    ERROR(cudaErrorHostMemoryNotRegistered, 713, "pointer does not correspond to a registered memory region")         \
    ERROR(cudaErrorMisalignedAddress, 716, "misaligned address")                                                      \
    ERROR(cudaErrorLaunchFailure, 719, "unspecified launch failure")                                                  \
    ERROR(cudaErrorCooperativeLaunchTooLarge, 720, "too many blocks in cooperative launch")                           \
    ERROR(cudaErrorNotSupported, 801, "operation not supported")                                                      \
    ERROR(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")                 \
    ERROR(cudaErrorStreamCaptureInvalidated, 901, "operation failed due to a previous error during capture")          \
    ERROR(cudaErrorStreamCaptureIsolation, 905, "dependency created on uncaptured work in another stream")            \
    ERROR(cudaErrorStreamCaptureImplicit, 906,                                                                        \
          "operation would make the legacy stream depend on a capturing blocking stream")                             \
    ERROR(cudaErrorCapturedEvent, 907, "operation not permitted on an event last recorded in a capturing stream")     \
    ERROR(cudaErrorUnknown, 999, "unknown error")

#define CUDA_CPU_ENUMERATOR(name, number, text) name = number,
enum cudaError_t { CUDA_CPU_ERRORS(CUDA_CPU_ENUMERATOR) };
using cudaError = cudaError_t;

#define CUDA_CPU_NAME(name, number, text) \
    if (error == name) return #name;
#define CUDA_CPU_TEXT(name, number, text) \
    if (error == name) return text;
inline const char* cudaGetErrorName(cudaError_t error) {
    CUDA_CPU_ERRORS(CUDA_CPU_NAME)
    return "unrecognized error code";
}
inline const char* cudaGetErrorString(cudaError_t error) {
    CUDA_CPU_ERRORS(CUDA_CPU_TEXT)
    return "unrecognized error code";
}

namespace cuda_cpu {
inline thread_local cudaError_t last_error = cudaSuccess;

inline cudaError_t report(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

// Returns the parts of a message, one after another.
template <class... Parts> std::string text_of(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}

// For calls that return a value, or delete an object, and cannot fail.
template <class T> inline cudaError_t set_result(T* to, T value) {
    *to = value;
    return cudaSuccess;
}
template <class Object> inline cudaError_t destroy_object(const Object* object) {
    delete object;
    return cudaSuccess;
}
}  // namespace cuda_cpu

inline cudaError_t cudaPeekAtLastError() { return cuda_cpu::last_error; }
inline cudaError_t cudaGetLastError() { return std::exchange(cuda_cpu::last_error, cudaSuccess); }
