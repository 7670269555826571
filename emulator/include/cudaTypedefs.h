// The types of the driver's functions. See cuda.h.
#pragma once

#include "cuda.h"
