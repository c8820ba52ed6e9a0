// CUDA C++ for a host compiler: what a kernel's text expects to find, without a GPU. It is included before that text.
//
// Approximate intrinsics are computed exactly. What costs time on a GPU (cache hints, alignment of structs beyond what
// vector types ask for, launch bounds) is accepted and means nothing here.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <type_traits>
#include <utility>

#include "cudacpu/types.h"
#include "cudacpu/threads.h"

#include "cudacpu/half.h"
#include "cudacpu/math.h"
#include "cudacpu/memory.h"
#include "cudacpu/cooperative.h"
#include "cudacpu/export.h"
