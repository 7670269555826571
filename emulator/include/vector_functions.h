#include "cuda_runtime.h"  // which holds all of it
