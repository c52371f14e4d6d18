// The formats of a selection.
#pragma once

namespace anabranch {

enum class MapFormat { none, bytes, bits, indices };

}  // namespace anabranch
