// Names of exchanges, which custom calls of XLA use to find them.
#include "exchange/registry.h"

#include <gtest/gtest.h>

#include <string>

#include "support.h"

namespace anabranch::exchange::testing {
namespace {

// The registry never reads an exchange.
ab_exchange* fake(uintptr_t number) { return reinterpret_cast<ab_exchange*>(number); }

TEST(ExchangeRegistry, FindsTheExchangeOfEachDevice) {
  Registry registry;
  EXPECT_OK(registry.add("4 of 2", 0, fake(8)));
  EXPECT_OK(registry.add("4 of 2", 1, fake(16)));
  EXPECT_OK(registry.add("4", 1, fake(24)));
  ab_exchange* found = nullptr;
  EXPECT_OK(registry.find("4 of 2", 0, &found));
  EXPECT_EQ(found, fake(8));
  EXPECT_OK(registry.find("4 of 2", 1, &found));
  EXPECT_EQ(found, fake(16));
  EXPECT_OK(registry.find("4", 1, &found));
  EXPECT_EQ(found, fake(24));
}

TEST(ExchangeRegistry, AnUnknownNameIsAnError) {
  Registry registry;
  ab_exchange* found = nullptr;
  EXPECT_REFUSED(registry.find("a", 0, &found), AB_INVALID_ARGUMENT,
                 "got \"a\" on device 0, expected one of the 0 exchanges of this process; either the program "
                 "was compiled in another process");
  EXPECT_OK(registry.add("a", 0, fake(8)));
  EXPECT_REFUSED(registry.find("a", 1, &found), AB_INVALID_ARGUMENT, "got \"a\" on device 1, expected one of the 1");
  EXPECT_REFUSED(registry.find("a ", 0, &found), AB_INVALID_ARGUMENT, "got \"a \" on device 0");
  EXPECT_EQ(found, nullptr);
  registry.remove(fake(8));
  EXPECT_REFUSED(registry.find("a", 0, &found), AB_INVALID_ARGUMENT, "or the exchange was destroyed");
  EXPECT_OK(registry.add("a", 0, fake(16)));
}

TEST(ExchangeRegistry, ANameIsGivenOncePerDevice) {
  Registry registry;
  EXPECT_OK(registry.add("a", 0, fake(8)));
  EXPECT_REFUSED(registry.add("a", 0, fake(16)), AB_INVALID_ARGUMENT,
                 "name: got \"a\", which another exchange of device 0 has");
  EXPECT_REFUSED(registry.add("", 0, fake(16)), AB_INVALID_ARGUMENT, "name: got an empty name");
  ab_exchange* found = nullptr;
  EXPECT_OK(registry.find("a", 0, &found));
  EXPECT_EQ(found, fake(8));
}

TEST(ExchangeRegistry, AMessageShowsTheBeginningOfALongName) {
  Registry registry;
  ab_exchange* found = nullptr;
  EXPECT_REFUSED(registry.find(std::string(100000, 'x'), 3, &found), AB_INVALID_ARGUMENT, "xxx\" on device 3");
}

}  // namespace
}  // namespace anabranch::exchange::testing
