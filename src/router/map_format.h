// How it is said which experts a token has.
#pragma once

namespace anabranch {

enum class MapFormat { none, bytes, bits, indices };

}  // namespace anabranch
