// A part of cuda_runtime.h, in CUDA.
#pragma once

#include "cuda_runtime.h"
