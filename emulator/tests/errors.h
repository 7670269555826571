// What the runtime says of a kernel that is wrong.
#pragma once

#include <gtest/gtest.h>
#include <kf_simt.h>

#include <initializer_list>
#include <string>

namespace test {

template <class Launch>
std::string error_of(Launch launch) {
  try {
    launch();
  } catch (const kf::simt::Error& error) {
    return error.what();
  }
  return "no error";
}

inline void expect_parts(const std::string& text, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "no `" << part << "` in: " << text;
  }
}

template <class Launch>
void expect_error(Launch launch, std::initializer_list<std::string> parts) {
  expect_parts(error_of(launch), parts);
}

}  // namespace test
