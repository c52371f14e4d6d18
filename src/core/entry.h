// The common prologue of all functions of the C interface.
#pragma once

#include "core/ieee.h"
#include "core/isa.h"
#include "core/structs.h"
#include "core/tensor.h"

namespace anabranch {

// Copies both structs into the current layout and makes the checks that all operations share. Sets IEEE arithmetic on
// the calling thread for its lifetime.
template <class Args>
class Entry {
 public:
  Entry(const Args** args, const ab_exec** exec) : status_(take_struct(*args, &args_)) {
#ifndef ANABRANCH_CUDA
    if (status_.code == AB_OK) status_ = check_isa();
#endif
    if (status_.code == AB_OK) status_ = take_exec(*exec, &exec_);
    *args = &args_;
    *exec = &exec_;
  }
  Entry(const Args** args, const ab_exec** exec, const size_t* bytes) : Entry(args, exec) {
    if (status_.code == AB_OK && bytes == nullptr)
      status_ = AB_INVALID("bytes: got NULL, expected a pointer to a size_t");
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  const ab_status& status() const { return status_; }

 private:
  ScopedIeeeArithmetic ieee_;
  Args args_;
  ab_exec exec_;
  ab_status status_;
};

// The first line of ab_OPERATION(args, exec) and of its workspace query. Afterwards both pointers refer to copies of
// the structs, and exec is not NULL. Nothing may throw past this function: an exception must not leave a C function, so
// callees that may throw are wrapped where they are called.
#define AB_ENTER(args, exec)                            \
  const ::anabranch::Entry ab_entry_(&(args), &(exec)); \
  AB_RETURN_IF_ERROR(ab_entry_.status())

#define AB_ENTER_QUERY(args, exec, bytes)                        \
  const ::anabranch::Entry ab_entry_(&(args), &(exec), (bytes)); \
  AB_RETURN_IF_ERROR(ab_entry_.status())

}  // namespace anabranch
