#include "cuda.h"  // which holds the types of the functions too
