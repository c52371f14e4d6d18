// What the library says of itself, with or without a GPU.
#include <gtest/gtest.h>

#include <string>

#include "anabranch/cuda.h"

namespace {

TEST(Describe, TellsTheVersionsThatTheHeaderNames) {
  char text[8192];
  ab_cuda_describe(text, sizeof(text));
  const std::string lines = std::string("\n") + text;
  for (const char* key : {"\nversion=", "\ncuda=", "\ndriver="}) {
    EXPECT_NE(lines.find(key), std::string::npos) << "no" << key << " in:" << lines;
  }
}

}  // namespace
