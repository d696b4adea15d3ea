/* The application's own stb_ds, its implementation in this file too, comes before ours. */
#define STB_DS_IMPLEMENTATION
#include <stb/stb_ds.h>

#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

#include "compat_stb.h"
