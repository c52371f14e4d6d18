// Memory of emulated devices that several processes access.
#pragma once

#include <cstddef>

namespace emulation {

void* allocate_shared(size_t bytes);

// Writes 64 bytes from which open_shared() of another process opens the memory, as long as this process runs.
bool export_shared(const void* memory, char* handle);
void* open_shared(const char* handle);

// Frees or closes shared memory; false: `memory` is something else.
bool free_shared(void* memory);

}  // namespace emulation
