// Of cuBLAS proper only the types are here; the products are cuBLASLt's.
#pragma once

#include "cublasLt.h"
