/* The application's own stb_ds, its implementation in this file too, comes after ours. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

#define STB_DS_IMPLEMENTATION
#include <stb/stb_ds.h>

#include "compat_stb.h"
