// The head of every function of the C interface.
#pragma once

#include "core/ieee.h"
#include "core/isa.h"
#include "core/structs.h"
#include "core/tensor.h"

namespace anabranch {

// Takes both structs as this library knows them and checks what all operations share. Until it goes out of scope,
// arithmetic is IEEE on the calling thread.
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
    if (status_.code == AB_OK && bytes == nullptr) status_ = AB_INVALID("bytes: got NULL, expected room for a size");
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

// The first line of ab_OPERATION(args, exec), and of its query for a workspace. From there on both pointers name copies
// of the structs, and exec is not NULL. Nothing may throw: an exception has no way out of a C function, so what throws
// is caught where it is called.
#define AB_ENTER(args, exec)                            \
  const ::anabranch::Entry ab_entry_(&(args), &(exec)); \
  AB_RETURN_IF_ERROR(ab_entry_.status())

#define AB_ENTER_QUERY(args, exec, bytes)                        \
  const ::anabranch::Entry ab_entry_(&(args), &(exec), (bytes)); \
  AB_RETURN_IF_ERROR(ab_entry_.status())

}  // namespace anabranch
